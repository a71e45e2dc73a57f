"""What is said of this machine's GPUs, on made tables of nvidia-smi and by stand-ins for it."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from doctor import gpus
from doctor.gpus import Gpu, Seen
from doctor.installed import Build
from settings.config import Config
from settings.finding import FAIL, PASS, WARN, Finding

A100 = Gpu("NVIDIA A100-SXM4-80GB", "GPU-aa11", "550.90.07", (8, 0), 81920, 4)
H100 = Gpu("NVIDIA H100 80GB HBM3", "GPU-bb22", "580.65.06", (9, 0), 81559, 1)
V100 = Gpu("Tesla V100-SXM2-32GB", "GPU-cc33", "580.65.06", (7, 0), 32768, 0)
T4 = Gpu("Tesla T4", "GPU-dd44", "535.104.05", (7, 5), 15360, 0)
B200 = Gpu("NVIDIA B200", "GPU-ee55", "570.10.01", (10, 0), 183359, 0)
CPU, CU126, CU130 = (
    Build("2.13.0+cpu"),
    Build("2.13.0+cu126", (12, 6)),
    Build("2.13.0+cu130", (13, 0)),
)


def config(**values: Any) -> Config:
    return dataclasses.replace(Config(), **values).derived()


def seen(*cards: Gpu, **values: Any) -> Seen:
    return Seen(cards, cards, **values)


def told(finding: Finding | None) -> str:
    assert finding
    return f"{finding.level} {finding.text}; {finding.fix}"


# ---- nvidia-smi


def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_table_of_nvidia_smi_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(
        tmp_path,
        monkeypatch,
        "echo '0, NVIDIA A100-SXM4-80GB, GPU-aa11, 550.90.07, 81920, 4, 8.0'\n"
        "echo '1, NVIDIA GB10, GPU-ff66, 580.95, [N/A], [N/A], 12.1'",
    )
    there = gpus.see()
    assert (
        there.visible == there.listed == (A100, Gpu("NVIDIA GB10", "GPU-ff66", "580.95", (12, 1)))
    )
    assert there.problem == "" and there.hidden_by is None


def test_a_driver_that_knows_no_compute_capability_is_asked_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(
        tmp_path,
        monkeypatch,
        '[[ $1 != *compute_cap* ]] || { echo \'Field "compute_cap" is not a valid field to '
        "query.'; exit 2; }\necho '0, Tesla T4, GPU-dd44, 470.10, 15360, 0'",
    )
    assert (
        gpus.see().listed == (dataclasses.replace(T4, driver="470.10", capability=None),)
        and not gpus.see().problem
    )


def test_what_nvidia_smi_says_instead_of_a_table_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(
        tmp_path,
        monkeypatch,
        "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
    )
    there = gpus.see()
    assert (
        there.listed == ()
        and there.problem == "Failed to initialize NVML: Driver/library version mismatch"
    )
    smi(
        tmp_path,
        monkeypatch,
        "echo '0, Tesla T4, GPU-dd44, 535.104.05, 15360, 0, 7.5'\n"
        "echo 'Unable to determine the device handle for GPU 0: GPU is lost.'; exit 15",
    )
    there = gpus.see()
    assert there.listed == (T4,) and there.problem.endswith("GPU is lost.")
    (finding,) = gpus.gpus(config(), dataclasses.replace(there, problem=there.problem))[:1]
    assert finding.level == WARN and "GPU is lost" in finding.text


def test_a_driver_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, "exec sleep 30")
    monkeypatch.setattr(gpus, "SMI_S", 0.2)
    assert gpus.see().problem == "nvidia-smi does not answer within 0 s"


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("1", ["GPU-bb22"]),
        ("1,0", ["GPU-bb22", "GPU-aa11"]),
        ("0,-1,1", ["GPU-aa11"]),
        ("0,7,1", ["GPU-aa11"]),
        ("GPU-bb", ["GPU-bb22"]),
        ("GPU-", []),
        ("NoDevFiles", []),
        ("", []),
        ("MIG-12", ["MIG-12"]),
    ],
)
def test_cuda_visible_devices_chooses_as_cuda_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, names: list[str]
) -> None:
    smi(
        tmp_path,
        monkeypatch,
        "echo '0, NVIDIA A100-SXM4-80GB, GPU-aa11, 550.90.07, 81920, 4, 8.0'\n"
        "echo '1, NVIDIA H100 80GB HBM3, GPU-bb22, 580.65.06, 81559, 1, 9.0'",
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    there = gpus.see()
    assert [gpu.uuid for gpu in there.visible] == names
    assert there.hidden_by == (None if len(names) == 2 else value)


# ---- gpus


@pytest.mark.parametrize(("node", "code"), [("", 78), ("node-7", 71)])
def test_an_old_driver_is_a_fault_of_a_pods_machine(
    monkeypatch: pytest.MonkeyPatch, node: str, code: int
) -> None:
    monkeypatch.setenv("K8S_NODE", node)
    build = Build("2.13.0+cu130", (13, 0))
    old = gpus.driver(config(device="cuda"), seen(A100), build)
    assert old and "is too old" in old.text and old.code == code
    without = gpus.driver(config(device="cuda"), seen(A100), Build("2.13.0+cpu"))
    assert without and without.level == FAIL and without.code == 78, "the image is on every node"


def test_no_gpu_is_an_error_only_where_one_is_asked_for() -> None:
    assert told(gpus.gpus(config(), seen())[0]) == "PASS none here; the run takes the CPU; "
    (finding,) = gpus.gpus(config(device="cuda"), seen())
    assert (
        told(finding)
        == (
            "FAIL No GPU found (nvidia-smi lists none). DEVICE=cuda, which presets for GPUs set, "
            "needs one; On a CPU, use PRESET=tiny, or DEVICE=cpu"
        )
        and finding.code == 64
    )
    assert gpus.gpus(config(device="cpu"), seen(A100))[0].level == PASS


@pytest.mark.parametrize(("device", "level"), [("auto", WARN), ("cuda", FAIL)])
def test_a_driver_that_does_not_work_is_no_machine_without_gpus(device: str, level: str) -> None:
    for there, words in (
        (seen(problem="version mismatch"), "version mismatch"),
        (seen(devices=True), "no nvidia-smi"),
    ):
        (finding,) = gpus.gpus(config(device=device), there)
        assert finding.level == level and words in finding.text and finding.fix


def test_gpus_that_are_hidden_are_said_to_be() -> None:
    hidden = Seen((A100, H100), (), "-1")
    (finding,) = gpus.gpus(config(device="cuda"), hidden)
    assert finding.level == FAIL and "CUDA_VISIBLE_DEVICES=-1 hides the 2 GPUs" in finding.text
    (finding,) = gpus.gpus(config(), hidden)
    assert finding.level == PASS and "takes the CPU" in finding.text
    assert (
        "(CUDA_VISIBLE_DEVICES=1, of 2)"
        in gpus.gpus(config(), Seen((A100, H100), (H100,), "1"))[0].text
    )


def test_more_processes_than_gpus_are_refused() -> None:
    (finding,) = gpus.gpus(config(nproc=4), seen(A100, A100))
    assert (
        told(finding) == "FAIL NPROC=4: only 2 GPUs can be used here; set NPROC=2"
        and finding.code == 64
    )
    assert gpus.gpus(config(nproc=2), seen(A100, A100))[0].text == "2 x NVIDIA A100-SXM4-80GB"


def test_mixed_unknown_and_busy_cards_are_named_where_the_run_takes_them() -> None:
    strange = dataclasses.replace(A100, name="NVIDIA Strange", used_mib=61440)
    by_name = {finding.name: finding for finding in gpus.gpus(config(), seen(A100, strange))}
    assert [by_name[name].level for name in ("gpus", "gpu-mix", "gpu-card", "gpu-memory")] == [
        PASS,
        WARN,
        WARN,
        WARN,
    ]
    assert "1 x NVIDIA A100-SXM4-80GB and 1 x NVIDIA Strange" in by_name["gpu-mix"].text
    assert "nothing is known of NVIDIA Strange" in by_name["gpu-card"].text
    assert "60.0 of 80 GiB of card 1" in by_name["gpu-memory"].text  # 61440 and 81920 MiB
    assert [f.name for f in gpus.gpus(config(nproc=1), seen(A100, strange))] == ["gpus"]


# ---- driver


@pytest.mark.parametrize(
    ("card", "build", "level", "words"),
    [
        (
            A100,
            CU126,
            PASS,
            "driver 550.90.07 fits torch 2.13.0+cu126, for CUDA 12.6 (525.60.13 or later)",
        ),
        (
            A100,
            CU130,
            FAIL,
            "driver 550.90.07 is too old for torch 2.13.0+cu130, for CUDA 13.0, which needs 580; make "
            "setup TORCH_BACKEND=cu126",
        ),
        (H100, CU130, PASS, "fits"),
        (
            H100,
            CPU,
            FAIL,
            "torch 2.13.0+cpu uses no GPU, and this machine has 1 GPU (driver 580.65.06); make setup "
            "TORCH_BACKEND=cu130",
        ),
        (
            dataclasses.replace(A100, driver="525.60.12"),
            CU126,
            FAIL,
            "needs 525.60.13; install driver 525.60.13 or later, "
            "then make setup TORCH_BACKEND=cu126",
        ),
        (
            V100,
            CU130,
            FAIL,
            "no code for Tesla V100-SXM2-32GB (compute capability 7.0); make setup TORCH_BACKEND=cu126",
        ),
        (V100, CU126, PASS, "fits"),
        (T4, CU126, PASS, "fits"),
        (
            B200,
            CU126,
            FAIL,
            "no code for NVIDIA B200 (compute capability 10.0); install driver 580 or later, then make "
            "setup TORCH_BACKEND=cu130",
        ),
        (A100, Build("2.19.0", (14, 0)), PASS, "is not known here"),
    ],
)
def test_the_driver_must_fit_the_build(card: Gpu, build: Build, level: str, words: str) -> None:
    finding = gpus.driver(config(device="cuda"), seen(card), build)
    assert told(finding).startswith(level) and words in told(finding)


def test_a_driver_that_leaves_the_gpus_unused_is_a_warning_where_the_cpu_will_do() -> None:
    finding = gpus.driver(config(), seen(A100), CU130)
    assert finding and finding.level == WARN
    assert gpus.driver(config(device="cpu"), seen(A100), CU130) is None
    assert (
        gpus.driver(config(), seen(), CU130) is None
        and gpus.driver(config(), seen(A100), Build(None)) is None
    )


def test_no_build_fits_cards_of_too_many_ages() -> None:
    finding = gpus.driver(config(device="cuda"), seen(dataclasses.replace(V100), B200), CU126)
    assert "choose some with CUDA_VISIBLE_DEVICES" in told(finding)


# ---- bf16, attention, NVML


def test_bfloat16_needs_units_for_it() -> None:
    c = config(dtype="bfloat16")
    for card in (V100, T4):
        finding = gpus.bf16(c, seen(card), None)
        assert (
            told(finding)
            == f"FAIL DTYPE=bfloat16: {card.name} has no bfloat16 units; set DTYPE=float32"
        )
        assert finding and finding.code == 64
    assert told(gpus.bf16(c, seen(A100), None)).startswith(PASS)
    unknown = Gpu("NVIDIA Strange", "GPU-1", "535")
    assert told(gpus.bf16(c, seen(unknown), None)).startswith(WARN)
    assert told(gpus.bf16(c, seen(dataclasses.replace(A100, capability=None)), None)).startswith(
        PASS
    )  # by its card
    assert gpus.bf16(config(), seen(V100), None) is None


def test_a_processor_without_bfloat16_is_a_warning() -> None:
    c = config(dtype="bfloat16")
    assert (
        told(gpus.bf16(c, seen(), frozenset({"avx2", "avx512_bf16"})))
        == "PASS the processor has avx512_bf16; "
    )
    assert told(gpus.bf16(c, seen(), frozenset({"avx2"}))).startswith(WARN)
    assert gpus.bf16(c, seen(), None) is None
    assert (
        gpus.bf16(config(dtype="bfloat16", device="cuda"), seen(), frozenset()) is None
    )  # said by gpus


def test_a_kernel_that_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpus.attention(config(), seen()) is None
    fa3 = config(attention="fa3", dtype="bfloat16")
    assert told(gpus.attention(fa3, seen())) == (
        "FAIL ATTENTION=fa3: it runs on NVIDIA GPUs only, and there is none here; "
        "set ATTENTION=auto or sdpa"
    )
    assert "NVIDIA A100-SXM4-80GB is no Hopper card" in told(gpus.attention(fa3, seen(A100)))
    assert "Tesla T4 is no Ampere or later card" in told(
        gpus.attention(config(attention="flash-attn", dtype="bfloat16"), seen(T4))
    )
    assert "flash_attn_interface is not installed" in told(gpus.attention(fa3, seen(H100)))
    (tmp_path / "flash_attn_interface.py").write_text("raise SystemExit('must not be loaded')")
    monkeypatch.syspath_prepend(tmp_path)
    assert told(gpus.attention(fa3, seen(H100))).startswith(PASS)


def test_nvml_that_does_not_load_costs_the_sampler_only() -> None:
    assert gpus.nvml(seen()) is None
    try:
        import pynvml

        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert told(gpus.nvml(seen(A100))).startswith(WARN) and "NVML does not start" in told(
            gpus.nvml(seen(A100))
        )
    else:
        count = pynvml.nvmlDeviceGetCount()
        assert told(gpus.nvml(seen(A100))).startswith(f"PASS NVML tells of {count} GPU")
