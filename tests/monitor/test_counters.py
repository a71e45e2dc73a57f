"""monitor/gpu_sampler/counters.py, interfaces.py and readings.py's words: cells, faults that are said once, bytes per second."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pynvml import NVMLError

from monitor.gpu_sampler.counters import Complaints, Counter
from monitor.gpu_sampler.interfaces import Network
from monitor.gpu_sampler.readings import reasons, thousandth

LOST, NOT_SUPPORTED, TIMEOUT = 15, 3, 10


class Gpu:
    """A reading that gives what it is told to: a value, or a code."""

    def __init__(self) -> None:
        self.value, self.code, self.calls = 1000, 0, 0

    def read(self) -> int:
        self.calls += 1
        if self.code:
            raise NVMLError(self.code)
        return self.value


def counter(
    gpu: Gpu, said: list[str], name: str = "power_w", complaints: Complaints | None = None
) -> Counter:
    return Counter(
        0, name, gpu.read, thousandth, complaints or Complaints(said.append), patience=100
    )


@pytest.mark.parametrize(
    ("raw", "text"),
    [(0, "0.000"), (7, "0.007"), (650_000, "650.000"), (2**63 - 1, "9223372036854775.807")],
)
def test_thousandths_are_exact(raw: int, text: str) -> None:
    assert thousandth(raw) == text


def test_what_fails_is_an_empty_cell_and_one_line_and_comes_back() -> None:
    gpu, said = Gpu(), list[str]()
    power = counter(gpu, said)
    assert power.cell(0) == "1.000"
    gpu.code = LOST
    assert [power.cell(slot) for slot in range(1, 1001)] == [""] * 1000
    assert said == ["gpu0: GPU is lost; its cells stay empty as long as it does not answer"]
    # at slots 1, 2, 4, 8, ... 64, 128, and from there every hundredth
    assert gpu.calls == 1 + 8 + 8 and power.faults == {"GPU is lost": 16}
    gpu.code, gpu.value = 0, 2000
    cells = [power.cell(slot) for slot in range(1001, 1102)]
    assert cells[-1] == "2.000" and set(cells) == {"", "2.000"}
    gpu.code = LOST
    power.cell(1102)
    assert said[1:] == ["gpu0 answers again"]  # and nothing more is said of it


def test_a_value_that_comes_back_unchanged_is_shown_again() -> None:
    gpu, said = Gpu(), list[str]()
    power = counter(gpu, said)
    assert power.cell(0) == "1.000"
    gpu.code = TIMEOUT
    assert power.cell(1) == ""
    gpu.code = 0
    assert (power.cell(2), said[-1]) == ("1.000", "gpu0 answers again")
    assert power.period.gaps == {}  # no change was seen


def test_what_is_not_supported_is_asked_for_once_and_said_once_for_all_gpus() -> None:
    gpu, said = Gpu(), list[str]()
    gpu.code, complaints = NOT_SUPPORTED, Complaints(said.append)
    for name in ("energy_j", "energy_j", "power_inst_w"):
        one, calls = counter(gpu, said, name, complaints), gpu.calls
        assert {one.cell(slot) for slot in range(500)} == {""}
        assert gpu.calls == calls + 1
    assert said == [
        f"gpu0_{name}: Not Supported; the cells of such GPUs stay empty"
        for name in ("energy_j", "power_inst_w")
    ]


@pytest.mark.parametrize(
    ("bits", "words"),
    [(0, "none"), (1, "idle"), (0x44, "power_cap+hw_thermal"), (0x8004, "power_cap+0x8000")],
)
def test_reasons_for_low_clocks_are_words(bits: int, words: str) -> None:
    assert reasons(bits) == words


# ---- The network

HEAD = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
"""


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Network]:
    """network(eth0=(in, out), ...): the counters as the kernel writes them; mlx5_0 is an InfiniBand port, in words."""
    counters = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)

    def network(words: tuple[int, int], **totals: tuple[int, int]) -> Network:
        lines = [
            f"{name:>6}: {got} 9 0 0 0 0 0 0 {sent} 8 0 0 0 0 0 0\n"
            for name, (got, sent) in totals.items()
        ]
        (tmp_path / "dev").write_text(HEAD + "".join(lines))
        for name, value in zip(("port_rcv_data", "port_xmit_data"), words, strict=True):
            (counters / name).write_text(f"{value}\n")
        return Network(tmp_path / "dev", tmp_path / "infiniband")

    return network


def test_bytes_per_second_of_each_interface(machine: Callable[..., Network]) -> None:
    network = machine((10, 20), lo=(5, 5), eth0=(1000, 50), veth1a=(1, 1), ib0=(0, 0))
    assert network.columns == [
        f"net_{name}_{way}_bytes_per_s"
        for name in ("eth0", "ib0", "mlx5_0:1")
        for way in ("in", "out")
    ]
    assert network.cells(10.0) == [""] * 6  # since when is not known
    machine((10 + 250, 20 + 500), lo=(9, 9), eth0=(4000, 2050), ib0=(0, 1), eth1=(7, 7))
    assert network.cells(12.0) == ["1500", "1000", "0", "0", "500", "1000"]


def test_an_interface_that_is_gone_or_begins_anew_is_an_empty_cell(
    machine: Callable[..., Network],
) -> None:
    network = machine((0, 0), eth0=(1000, 1000), eth1=(5, 5))
    network.cells(1.0)
    machine((0, 0), eth0=(10, 2000))
    assert network.cells(2.0)[:4] == ["", "1000", "", ""]
    machine((0, 0), eth0=(20, 2000), eth1=(100, 100))
    assert network.cells(3.0)[:4] == ["10", "0", "", ""]


def test_without_counters_there_are_no_columns(tmp_path: Path) -> None:
    network = Network(tmp_path / "dev", tmp_path / "infiniband")
    assert network.columns == [] and network.cells(1.0) == []
