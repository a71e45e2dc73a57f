"""plan/sweep.py: a row is what its settings give when they are typed, and the star is what a search over rows finds."""

import pytest

from hardware.model_size import parameters
from plan.measured import Probe
from plan.scaling import expected_loss
from plan.sweep import EQUAL_LOSS, Row, Sweep, compare, report
from plan.time import pace_of, time_of
from settings import SettingsError
from tests.plan.conftest import XLARGE, Given

PLAIN = {"PRESET": "d16-2xh100"}
D16 = PLAIN | {"MFU": "44"}


def swept(run, *typed: Given, probe: Probe | None = None) -> Sweep:
    return compare(run(*typed), probe)


def as_given(typed: str) -> Given:
    return dict(pair.split("=", 1) for pair in typed.split())


def row(found: Sweep, start: str) -> Row:
    return next(row for row in found.rows if row.label.startswith(start))


@pytest.mark.parametrize(
    ("base", "kind"),
    [
        (D16, "depth"),
        (XLARGE | {"MFU": "51"}, "depth"),
        (XLARGE | {"MFU": "51", "N_KV_HEAD": "4", "WARMUP_TOKENS": "3000000000"}, "depth"),
        (D16 | {"MAX_STEPS": "5000"}, "1"),
        ({"PRESET": "gpt2-124m", "CARDS": "1xrtx4090", "MFU": "50"}, "depth"),
        (D16, "gpus"),
        (XLARGE | {"NODES": "4"}, "gpus"),
    ],
)
def test_each_row_is_what_its_settings_give(run, base: Given, kind: str) -> None:
    found = swept(run, base, {"SWEEP": kind})
    assert len(found.rows) >= 7
    for one in found.rows:
        again = run(base, as_given(one.typed))
        config = again.config
        assert parameters(config).total == one.parameters
        assert config.last_step * config.batch_tokens == one.tokens
        time = time_of(config, pace_of(again, None))
        assert time.total_seconds / 3600 == pytest.approx(one.hours, rel=1e-9)
        assert one.gpu_hours == pytest.approx(one.hours * again.fleet.processes)
        assert again.memory.total == one.memory_bytes
        if one.tokens_within:
            within = run(base, as_given(one.typed_within))
            read = within.config.last_step * within.config.batch_tokens
            assert read == one.tokens_within
            assert one.loss_within == pytest.approx(expected_loss(one.parameters, read), abs=0.02)


def test_the_mfu_does_not_depend_on_which_presets_exist(run) -> None:
    """All rows have the MFU of the run, also depth 24, whose own preset has another one."""
    found = swept(run, PLAIN, {"SWEEP": "depth"})
    assert row(found, "d24").parameters == 880_885_248  # the preset's
    assert row(found, "d24").typed.endswith(" MFU=43.8")
    rates = {one.label: one.tokens_per_s * flops_of(run, one) for one in found.rows}
    assert max(rates.values()) == pytest.approx(min(rates.values()))


def flops_of(run, one: Row) -> float:
    return run(PLAIN, as_given(one.typed)).model.flops()


def test_the_star_is_the_lowest_loss_in_the_hours_that_there_are(run) -> None:
    for hours in ("4", "20", "100"):
        found = swept(run, D16, {"SWEEP": "depth", "TARGET_HOURS": hours})
        best = row(found, found.recommended)
        lowest = min(one.loss_within for one in found.rows if one.fits and one.loss_within)
        assert best.fits and best.loss_within <= lowest + EQUAL_LOSS
        again = run(D16, as_given(best.typed_within))
        time = time_of(again.config, pace_of(again, None))
        assert time.total_seconds <= float(hours) * 3600 * (1 + 1e-9)


def test_nothing_is_recommended_where_the_speed_is_not_known(run) -> None:
    cpu = {"PRESET": "tiny", "CARDS": "cpu", "SWEEP": "depth"}
    found = swept(run, cpu)
    assert found.recommended is None and "not known" in found.why
    # Measured, the law covers none of what so little compute reaches.
    found = swept(run, cpu | {"DTYPE": "float32"}, probe=Probe("cpu", 0.0, "", {"float32": 0.1}))
    assert found.recommended is None


def test_the_fewest_gpus_that_are_in_time(run) -> None:
    found = swept(run, XLARGE, {"SWEEP": "gpus", "TARGET_HOURS": "450"})
    assert found.recommended == "4 GPUs, ddp"
    assert row(found, "2 GPUs, ddp").hours > 450 > row(found, "4 GPUs, ddp").hours
    none = swept(run, XLARGE, {"SWEEP": "gpus", "TARGET_HOURS": "50"})
    assert none.recommended is None and "50:00 h" in none.why


def test_gpus_of_several_sites_are_compared_together_too(run) -> None:
    sites = {"NODES": "4", "SITES": "4", "SYNC": "diloco", "PARALLEL": "fsdp", "SWEEP": "gpus"}
    found = swept(run, XLARGE, sites)
    assert {"8 GPUs on 4 nodes at 4 sites, fsdp", "8 GPUs, ddp"} <= {
        one.label for one in found.rows
    }
    assert found.recommended == "8 GPUs, ddp"
    assert "MASTER_ADDR" not in row(found, "8 GPUs, ddp").typed


def test_more_gpus_that_wait_are_not_recommended(run) -> None:
    """Over 25 Gbit/s 16 GPUs in two nodes take nearly twice the GPU-hours of eight."""
    found = swept(run, XLARGE, {"SWEEP": "gpus"})
    assert found.recommended == "8 GPUs, ddp"
    assert row(found, "16 GPUs").gpu_hours > 1.5 * row(found, "8 GPUs").gpu_hours


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ({"CARDS": "1xt4", "SWEEP": "depth"}, "t4 has no bfloat16 units. Try: DTYPE=float32"),
        (
            {"CARDS": "cpu", "DEVICE": "cpu", "SWEEP": "gpus"},
            "SWEEP=gpus compares numbers of a GPU",
        ),
        ({"CARDS": "7xh100-sxm", "SWEEP": "gpus"}, "BATCH_TOKENS"),
    ],
)
def test_what_cannot_be_compared(run, typed: Given, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        swept(run, PLAIN, typed)


def test_the_table_has_one_star_and_the_settings_to_add(run) -> None:
    for kind in ("depth", "gpus"):
        found = swept(run, D16, {"SWEEP": kind, "TARGET_HOURS": "20"})
        lines = report(found).splitlines()
        assert [line for line in lines if line.startswith("*")].__len__() == 1
        assert "Add: " in report(found) and max(map(len, lines)) <= 100
        assert found.as_json()["recommended"] == found.recommended
