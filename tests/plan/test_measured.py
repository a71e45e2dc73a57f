"""plan/measured.py: what was measured is read as it was written, or not at all."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from plan import measured as probe
from plan.measured import DECIDES, Probe, Step, path_of, read, shape_of, to_json
from settings import ROOT
from settings.config import SETTINGS, Config

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def c(tmp_path: Path) -> Config:
    return dataclasses.replace(Config(), runs_dir=str(tmp_path)).derived()


@pytest.fixture
def measured(c: Config) -> Probe:
    return Probe(
        H100,
        1764000000.25,
        "2.13.0+cu130",
        {"bfloat16": 703.5, "float32": 51.25},
        3010.0,
        371.5,
        None,
        (Step(shape_of(c), 2, 430600.0, 28.5), Step("0123456789ab", 1, 7.0, 0.5)),
    )


def write(c: Config, text: str, device: str = H100) -> Path:
    path = path_of(c, device)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_what_is_written_is_read(c: Config, measured: Probe, tmp_path: Path) -> None:
    assert write(c, to_json(measured)) == tmp_path / ".probe" / "NVIDIA-H100-80GB-HBM3.json"
    assert read(c, H100) == measured
    least = Probe("cpu", 0.0, "2.13.0", {})
    write(c, to_json(least), "cpu")
    assert read(c, "cpu") == least and least.steps == () and least.link_gb_s is None


def test_it_is_json_with_its_schema(measured: Probe) -> None:
    found = json.loads(to_json(measured))
    assert found["schema"] == 1 and found["matmul_tflops"] == {"bfloat16": 703.5, "float32": 51.25}
    assert found["steps"][1] == {
        "shape": "0123456789ab",
        "processes": 1,
        "tokens_per_s": 7.0,
        "peak_gib": 0.5,
    }
    assert to_json(measured).endswith("}\n")


def test_nothing_is_known_of_another_device(c: Config, measured: Probe) -> None:
    write(c, to_json(measured))
    assert read(c, "NVIDIA H100 PCIe") is None
    assert read(dataclasses.replace(c, runs_dir=c.runs_dir + "/none"), H100) is None


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"schema": None},
        {"unknown": 1},
        {"steps": [{"shape": "x"}]},
        {"steps": 3},
        {"steps": ["x"]},
        {"steps": [{"shape": "x", "processes": 1, "tokens_per_s": 1, "peak_gib": 1, "more": 1}]},
    ],
    ids=str,
)
def test_what_another_version_wrote_is_not_read(
    c: Config, measured: Probe, change: dict[str, object]
) -> None:
    good = json.loads(to_json(measured))
    write(c, json.dumps(good))
    assert read(c, H100) == measured
    write(c, json.dumps(good | change))
    assert read(c, H100) is None


@pytest.mark.parametrize("missing", ["schema", "device", "time", "torch", "matmul_tflops"])
def test_what_lacks_a_part_is_not_read(c: Config, measured: Probe, missing: str) -> None:
    found = json.loads(to_json(measured))
    del found[missing]
    write(c, json.dumps(found))
    assert read(c, H100) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '"schema"', '{"schema": 1}', "\ufffd"]
)
def test_what_is_damaged_is_not_read(c: Config, measured: Probe, text: str) -> None:
    write(c, text)
    assert read(c, H100) is None
    write(c, to_json(measured)[:-3])  # half written
    assert read(c, H100) is None


def test_bytes_that_are_no_text_and_a_folder_are_not_read(c: Config) -> None:
    write(c, "").write_bytes(b"\xff\xfe{")
    assert read(c, H100) is None
    path_of(c, "cpu").mkdir()
    assert read(c, "cpu") is None


# ---- Of which step


def test_a_step_counts_for_its_own_shape_and_number_of_processes_only(
    c: Config, measured: Probe
) -> None:
    assert measured.step(c, 2) == measured.steps[0]
    assert measured.step(c, 1) is None
    assert measured.step(dataclasses.replace(c, n_layer=c.n_layer + 1), 2) is None


def another(c: Config, name: str) -> Any:
    """A value of a setting that is not c's: another choice, the other bool, one more."""
    value, choices = (
        getattr(c, name),
        SETTINGS[name.upper()].choices,
    )
    if choices:
        return next(choice for choice in choices if choice != value)
    return not value if isinstance(value, bool) else (value or 1) + 1


@pytest.mark.parametrize("name", DECIDES)
def test_what_decides_how_fast_a_step_is_makes_another_shape(c: Config, name: str) -> None:
    assert shape_of(dataclasses.replace(c, **{name: another(c, name)})) != shape_of(c)


def test_what_does_not_decide_it_makes_no_other_shape(c: Config) -> None:
    others = {
        "run_name": "x",
        "seed": 5,
        "learning_rate": 1e-5,
        "train_tokens": 10,
        "data_mix": "x:1",
        "nproc": 4,
    }
    assert shape_of(dataclasses.replace(c, **others)) == shape_of(c)


def test_a_path_stays_inside_the_folder_of_probes_whatever_the_device_is_called(
    c: Config, tmp_path: Path
) -> None:
    for device in ("../../etc/x", "NVIDIA A100 80GB PCIe", "/abs", "a\nb"):
        assert path_of(c, device).parent == tmp_path / ".probe"
    assert (
        path_of(dataclasses.replace(c, runs_dir="runs"), "cpu")
        == ROOT / "runs" / ".probe" / "cpu.json"
    )
    assert probe.SCHEMA == 1
