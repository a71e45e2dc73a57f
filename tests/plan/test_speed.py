"""plan/speed.py: which MFU is taken and what follows from it, by hand."""

import dataclasses
from pathlib import Path

import pytest

from plan.fleet import Fleet, fleet_of
from plan.measured import Probe, Step, shape_of
from plan.speed import ASSUMED, SHARE_ON_CPU, speed
from settings import ROOT, load_preset
from settings.config import Config

PRESETS = sorted(
    path.stem
    for path in (ROOT / "presets").glob("*.env")
    if not path.read_text().startswith("# Fine-tuning")
)


def configured(**settings: str) -> Config:
    return load_preset(**settings)


@pytest.fixture
def xlarge() -> Config:
    return configured(PRESET="xlarge-8xa100", CARDS="8xa100-80gb-sxm")


def test_the_lab_s_plan_takes_205_hours_and_not_27(xlarge: Config) -> None:
    """9.2248 GFLOP a token, half of 8 x 312 TFLOP/s: 135,289 tokens/s; 100 billion of them are 205.3 hours."""
    found = speed(xlarge, fleet_of(xlarge), None)
    assert found.mfu_percent == 50 and found.peak_tflops == 8 * 312
    assert found.tokens_per_s == pytest.approx(0.5 * 8 * 312e12 / 9_224_847_360)
    assert found.step_s is not None and found.step_s * 190_735 / 3600 == pytest.approx(
        205.3, abs=0.05
    )
    assert found.why == "presets/xlarge-8xa100.env states 50% for it" and not found.measured
    at_peak = speed(dataclasses.replace(xlarge, mfu=100.0), fleet_of(xlarge), None)
    assert at_peak.step_s is not None and at_peak.step_s * 190_735 / 3600 == pytest.approx(
        102.7, abs=0.05
    )
    assert at_peak.tokens_per_s is not None and at_peak.tokens_per_s / 8 == pytest.approx(
        33_822, rel=1e-4
    )
    assert 4.4 * at_peak.tokens_per_s / 8 < 150_000  # what the lab planned of one A100


@pytest.mark.parametrize(
    ("preset", "tokens_per_s", "step_s"),
    [("d16-2xh100", 430_600, 1.217), ("d24-2xh100", 178_000, 2.94)],
)
def test_the_lab_s_measured_runs_come_out_again(
    preset: str, tokens_per_s: float, step_s: float
) -> None:
    """At the MFU that its log has, of a model whose products are counted here."""
    c = configured(PRESET=preset, CARDS="2xh100-sxm")
    found = speed(c, fleet_of(c), None)
    assert found.tokens_per_s == pytest.approx(tokens_per_s, rel=0.01)
    assert found.step_s == pytest.approx(step_s, rel=0.01)


def test_another_card_or_model_is_not_what_the_preset_speaks_of(xlarge: Config) -> None:
    for changes, percent in (
        ({"cards": "8xh100-sxm"}, 42.0),
        ({"n_layer": 12}, 50.0),
        ({"cards": "8xl40s"}, ASSUMED),
    ):
        c = dataclasses.replace(xlarge, **changes)
        found = speed(c, fleet_of(c), None)
        assert found.mfu_percent == percent and "presets/" not in found.why
    assert found.why.startswith("assumed: ")


@pytest.mark.parametrize(("how", "kept"), [("none", 1.0), ("full", 0.75)])
def test_what_is_computed_anew_is_not_the_model_s_work(
    xlarge: Config, how: str, kept: float
) -> None:
    """A third more work for the same tokens."""
    c = dataclasses.replace(xlarge, activation_checkpointing=how)
    assert speed(c, fleet_of(c), None).mfu_percent == pytest.approx(50 * kept)
    own = configured(
        PRESET="d32-8xh100", CARDS="8xh100-sxm"
    )  # which states its MFU with "selective"
    assert (
        own.activation_checkpointing == "selective"
        and speed(own, fleet_of(own), None).mfu_percent == 50
    )


def test_a_mixed_fleet_steps_with_its_slowest_card(xlarge: Config) -> None:
    """4 A100 and 4 A6000 (154.8 TFLOP/s) do 8 x 154.8, less than the A100 alone with their 4 x 312 would."""
    mixed = dataclasses.replace(xlarge, cards="4xa100-80gb-sxm,4xa6000")
    found = speed(mixed, fleet_of(mixed), None)
    assert found.peak_tflops == pytest.approx(8 * 154.8)
    assert found.peak_tflops < 4 * 312


def test_what_was_measured_of_this_shape_is_taken_before_all_but_the_setting(
    xlarge: Config,
) -> None:
    step = Step(shape_of(xlarge), 8, 150_000.0, 60.0)
    probe = Probe("NVIDIA A100-SXM4-80GB", 0.0, "2.13.0", {"bfloat16": 270.0}, steps=(step,))
    found = speed(xlarge, fleet_of(xlarge), probe)
    assert (
        found.measured
        and found.tokens_per_s == 150_000
        and found.step_s == pytest.approx(524_288 / 150_000)
    )
    assert found.mfu_percent == pytest.approx(100 * 150_000 * 9_224_847_360 / (8 * 312e12))
    assert speed(dataclasses.replace(xlarge, mfu=30.0), fleet_of(xlarge), probe).mfu_percent == 30
    other = dataclasses.replace(xlarge, micro_batch_size=4)
    assert not speed(other, fleet_of(other), probe).measured


def test_on_cpu_it_is_a_share_of_the_products_that_were_measured() -> None:
    c = configured(PRESET="tiny", DEVICE="cpu")
    fleet = Fleet((), 1)
    found = speed(c, fleet, Probe("cpu", 0.0, "", {"float32": 0.2}))
    assert found.tokens_per_s == pytest.approx(
        SHARE_ON_CPU / 100 * 0.2e12 / 16_515_072
    )  # FLOPs of the preset's top
    assert (
        speed(c, Fleet((), 2), Probe("cpu", 0.0, "", {"float32": 0.2})) == found
    )  # processes share the machine
    unknown = speed(
        dataclasses.replace(c, dtype="bfloat16"), fleet, Probe("cpu", 0.0, "", {"float32": 0.2})
    )
    assert unknown.tokens_per_s is None and "make doctor PROBE=1" in unknown.why


def test_a_card_without_bfloat16_has_no_speed_in_it(xlarge: Config) -> None:
    c = dataclasses.replace(xlarge, cards="8xv100-32gb-sxm")
    found = speed(c, fleet_of(c), None)
    assert found.tokens_per_s is None and found.why == "v100-32gb-sxm has no bfloat16 units"
    single = dataclasses.replace(c, dtype="float32")
    assert speed(single, fleet_of(single), None).peak_tflops == pytest.approx(8 * 15.7)


def test_the_hours_of_a_preset_s_top_are_those_of_the_plan(tmp_path: Path) -> None:
    for preset in PRESETS:
        c = configured(PRESET=preset)
        if c.cards:
            text = (ROOT / "presets" / f"{preset}.env").read_text()
            hours = float(
                next(line.split()[2] for line in text.splitlines() if line.startswith("#   hours"))
            )
            step_s = speed(c, fleet_of(c), None).step_s
            assert step_s is not None and step_s * c.last_step / 3600 == pytest.approx(
                hours, rel=0.02
            )
