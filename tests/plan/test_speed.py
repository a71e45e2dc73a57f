"""plan/speed.py: which MFU is taken and what follows from it, by hand."""

import pytest

from plan.measured import Probe, Step, shape_of
from plan.run import Run
from plan.speed import ASSUMED, MEASURED, MFU_ON_CPU, OTHERS, PRESET, SET, UNKNOWN_GPU, speed_of
from tests.plan.conftest import D16

LAB = {"PRESET": "xlarge-8xa100"}
FLOPS = 9_224_847_360  # of a token of LAB


def test_the_lab_s_plan_takes_205_hours_and_not_27(run) -> None:
    """Half of 8 x 312 TFLOP/s over 9.2248 GFLOP per token: 100 billion tokens take 205.3 hours."""
    found = speed_of(run(LAB), None)
    assert found.mfu_percent == 50
    assert found.peak_flops == 8 * 312e12
    assert found.tokens_per_s == pytest.approx(0.5 * 8 * 312e12 / FLOPS)
    assert found.step_s * 190_735 / 3600 == pytest.approx(205.3, abs=0.05)
    assert found.source == PRESET
    at_peak = speed_of(run(LAB, {"MFU": "100"}), None)
    assert at_peak.tokens_per_s / 8 == pytest.approx(33_822, rel=1e-4)
    assert 4.4 * at_peak.tokens_per_s / 8 < 150_000  # what the lab planned for one A100


@pytest.mark.parametrize(
    ("preset", "tokens_per_s", "step_s"),
    [("d16-2xh100", 430_600, 1.217), ("d24-2xh100", 178_000, 2.94)],
)
def test_the_lab_s_measured_runs_come_out_again(run, preset, tokens_per_s, step_s) -> None:
    found = speed_of(run({"PRESET": preset}), None)
    assert found.tokens_per_s == pytest.approx(tokens_per_s, rel=0.01)
    assert found.step_s == pytest.approx(step_s, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "percent", "source"),
    [
        ({"CARDS": "8xh100-sxm"}, 42.0, OTHERS),
        ({"N_LAYER": "12"}, 50.0, OTHERS),
        ({"CARDS": "8xl40s"}, UNKNOWN_GPU, ASSUMED),
        ({"CARDS": "8xrtx4090"}, 60.0, OTHERS),
        ({"CARDS": "8xrtx4090", "DTYPE": "float32"}, UNKNOWN_GPU, ASSUMED),
        ({"CARDS": "8xh100-sxm", "MFU": "51"}, 51.0, SET),
        ({"ACTIVATION_CHECKPOINTING": "full"}, 37.5, PRESET),
        ({"ACTIVATION_CHECKPOINTING": "full", "MFU": "51"}, 51.0, SET),
    ],
)
def test_a_preset_s_mfu_is_for_its_own_gpu_and_model(run, changes, percent, source) -> None:
    found = speed_of(run(LAB, changes), None)
    assert (found.mfu_percent, found.source) == (pytest.approx(percent), source)


def test_a_preset_that_recomputes_has_its_mfu_with_that(run) -> None:
    assert speed_of(run({"PRESET": "d32-8xh100"}), None).mfu_percent == 50
    none = run({"PRESET": "d32-8xh100", "ACTIVATION_CHECKPOINTING": "none"})
    assert speed_of(none, None).mfu_percent == pytest.approx(50 / 0.96)


def test_every_step_waits_for_the_slowest_gpu(run) -> None:
    """4 A100 and 4 A6000 (154.8 TFLOP/s) do 8 x 154.8, less than the A100 alone."""
    found = speed_of(run(LAB, {"CARDS": "4xa100-80gb-sxm,4xa6000"}), None)
    assert found.peak_flops == pytest.approx(8 * 154.8e12)


def test_a_measured_step_comes_before_all_but_the_setting(run) -> None:
    lab = run(LAB)
    step = Step(shape_of(lab.config), 8, 150_000.0, 60.0)
    probe = Probe("NVIDIA A100-SXM4-80GB", 0.0, "2.13.0", {"bfloat16": 270.0}, steps=(step,))
    found = speed_of(lab, probe)
    assert (found.source, found.tokens_per_s) == (MEASURED, 150_000)
    assert found.mfu_percent == pytest.approx(100 * 150_000 * FLOPS / (8 * 312e12))
    assert speed_of(run(LAB, {"MFU": "30"}), probe).mfu_percent == 30
    assert speed_of(run(LAB, {"MICRO_BATCH_SIZE": "4"}), probe).source == PRESET


def test_on_a_cpu_it_is_a_share_of_its_matrix_products(run) -> None:
    probe = Probe("cpu", 0.0, "", {"float32": 0.2})
    tiny = {"PRESET": "tiny", "CARDS": "cpu", "DTYPE": "float32"}
    expected = MFU_ON_CPU / 100 * 0.2e12 / 16_515_072  # FLOPs of the preset's head
    for processes in ("1", "2"):  # which share the machine
        found = speed_of(run(tiny, {"NPROC": processes}), probe)
        assert found.tokens_per_s == pytest.approx(expected)
    unknown = speed_of(run(tiny, {"DTYPE": "bfloat16"}), probe)
    assert unknown.tokens_per_s is None
    assert "make doctor PROBE=1" in unknown.why


def test_a_gpu_without_bfloat16_has_no_speed_in_it(run) -> None:
    found = speed_of(run(LAB, {"CARDS": "8xv100-32gb-sxm"}), None)
    assert (found.tokens_per_s, found.why) == (None, "v100-32gb-sxm has no bfloat16 units")
    single = speed_of(run(LAB, {"CARDS": "8xv100-32gb-sxm", "DTYPE": "float32"}), None)
    assert single.peak_flops == pytest.approx(8 * 15.7e12)


def test_frozen_weights_make_recomputing_dearer(run) -> None:
    """A step is 6 FLOPs per trained weight, 4 per frozen one; recomputing repeats 2 of either."""
    model = {"MODEL": "x/GLM-4.5-Air", "CARDS": "16xh200", "DTYPE": "bfloat16", "SEQ_LEN": "128"}
    full = {"ACTIVATION_CHECKPOINTING": "full"}

    def keeps(*typed: dict[str, str]) -> float:
        whole: Run = run(model, *typed)
        again: Run = run(model, *typed, full)
        return speed_of(again, None).mfu_percent / speed_of(whole, None).mfu_percent

    assert keeps({}) == pytest.approx(6 / 8, rel=0.01)
    assert keeps({"LORA_RANK": "8"}) == pytest.approx(4 / 6, rel=0.02)


def test_the_hours_at_the_head_of_a_preset_are_the_plan_s(run) -> None:
    assert speed_of(run(D16), None).step_s * 12_800 / 3600 == pytest.approx(4.3, abs=0.05)
