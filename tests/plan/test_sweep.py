"""plan/sweep/: rows are what the same settings give when they are typed, and the
recommendation is what a search over them finds."""

import dataclasses
import json
from pathlib import Path

import pytest

from hardware.model_size import parameters
from plan.checks import capacity_bytes, memory_of
from plan.fleet import Fleet
from plan.hours import hours_of
from plan.measured import Probe
from plan.scaling import expected_loss, worth
from plan.sweep import advice
from plan.sweep.report_rows import Row, Sweep, text
from plan.sweep.sweep import sweep
from settings import SettingsError
from settings.config import Config
from tests.plan.conftest import D16, XLARGE, Given, Load


def swept(c: Config, fleet: Fleet, probe: Probe | None = None) -> Sweep:
    return sweep(c, fleet, probe)


def as_given(typed: str) -> Given:
    return dict(pair.split("=", 1) for pair in typed.split())


def row(found: Sweep, label: str) -> Row:
    return next(row for row in found.rows if row.label == label)


@pytest.mark.parametrize(
    ("base", "kind"),
    [
        (D16, "depth"),
        (XLARGE, "depth"),
        (XLARGE | {"N_KV_HEAD": "4", "WARMUP_TOKENS": "3000000000"}, "depth"),
        ({"PRESET": "d32-8xh100", "CARDS": "1xa100-40gb-sxm"}, "depth"),
        (D16 | {"MAX_STEPS": "5000"}, "1"),
        ({"PRESET": "gpt2-124m", "CARDS": "1xrtx4090"}, "depth"),
        (D16, "gpus"),
        (XLARGE | {"NODES": "4", "SITES": "4"}, "gpus"),
    ],
)
def test_each_row_is_what_its_settings_give(load: Load, base: Given, kind: str) -> None:
    found = swept(*load(base, {"SWEEP": kind}))
    assert len(found.rows) >= 8
    for one in found.rows:
        c, fleet = load(base, as_given(one.typed))
        held, _ = load(base, as_given(one.typed), as_given(one.fits_with or ""))
        assert (parameters(c).total, c.last_step * c.batch_tokens) == (one.parameters, one.tokens)
        # of what is typed: computing anew takes longer
        assert hours_of(held, fleet, None) == pytest.approx(one.hours, rel=1e-9)
        assert one.gpu_hours == pytest.approx((one.hours or 0) * fleet.processes)
        assert (memory_of(c, fleet).total, capacity_bytes(fleet)) == (
            one.memory_bytes,
            one.capacity_bytes,
        )
        assert one.loss == expected_loss(one.parameters, worth(c))
        if one.fits_with:
            smaller, _ = load(base, as_given(one.typed), as_given(one.fits_with))
            assert not one.fits and memory_of(smaller, fleet).total <= one.capacity_bytes


def planned_again(load: Load, base: Given, command: str) -> tuple[Config, Fleet]:
    """The run that a sweep ends in, from its command and the env file alone."""
    words = command.split(" (")[0].split()
    assert words[0] == "make" and len({word.split("=")[0] for word in words[2:]}) == len(words[2:])
    return load(
        {name: value for name, value in base.items() if name == "ENV_FILE"},
        as_given(" ".join(words[2:])),
    )


def test_the_hours_are_those_of_what_memory_holds(load: Load) -> None:
    """On two cards of 24 GB depth 28 wants everything computed anew, at three quarters of the speed."""
    base = {"PRESET": "xlarge-8xa100", "CARDS": "2xrtx4090"}
    found = swept(*load(base, {"SWEEP": "depth", "TARGET_HOURS": "4000"}))
    deep = row(found, "d28")
    assert deep.fits_with == "ACTIVATION_CHECKPOINTING=full" and found.recommended == "d28"
    c, fleet = planned_again(load, base, found.reasons[-1])
    assert memory_of(c, fleet).total <= capacity_bytes(fleet)
    longer = dataclasses.replace(c, train_tokens=c.train_tokens + c.batch_tokens)
    assert (hours_of(c, fleet, None) or 0) <= 4000 < (hours_of(longer, fleet, None) or 0)
    assert (
        deep.tokens_within == c.last_step * c.batch_tokens
        and "with ACTIVATION_CHECKPOINTING=full" in str(found.reasons)
    )
    c, fleet = load(base, as_given(deep.typed))
    assert (deep.hours or 0) > 1.3 * (hours_of(c, fleet, None) or 0)


@pytest.mark.parametrize("kind", ["gpus", "depth"])
def test_the_command_has_all_that_was_given(load: Load, kind: str) -> None:
    """But no secret, and nothing twice."""
    given = {
        "OPTIMIZER": "adamw",
        "SEQ_LEN": "4096",
        "RUN_NAME": "mine",
        "DATA_MIX": "finepdfs:1",
        "MLP_DIM": "3008",
        "MIN_LEARNING_RATE": "0.00001",
        "HF_TOKEN": "hf_not_to_be_seen",
        "TARGET_HOURS": "5",
    }
    c, fleet = load({"PRESET": "d16-2xh100"}, given, {"SWEEP": kind})
    found = swept(c, fleet)
    assert "hf_not" not in json.dumps(found.as_json())
    again, _ = planned_again(load, given, found.reasons[-1])
    changed = {
        "gpus": {"cards"},
        "depth": {
            "n_layer",
            "n_embd",
            "n_head",
            "n_kv_head",
            "mlp_dim",
            "train_tokens",
            "decay_tokens",
        },
    }[kind]
    changed |= {"sweep", "hf_token"} | ({"target_hours"} if kind != "gpus" else set())
    mine, theirs = c.values(), again.values()
    assert {name.lower() for name in mine if mine[name] != theirs[name]} <= changed
    assert again.run_name == "mine" and again.data_mix == "finepdfs:1" and again.seq_len == 4096


def test_a_row_of_another_preset_has_what_was_given_and_no_secret(load: Load) -> None:
    given = {
        "RUN_NAME": "mine",
        "HF_TOKEN": "hf_not_to_be_seen",
        "WANDB_API_KEY": "a" * 40,
        "TARGET_HOURS": "20",
        "WEIGHT_DECAY": "0.05",
    }
    found = swept(*load({"PRESET": "d20-2xh100"}, given, {"SWEEP": "depth"}))
    assert found.recommended == "d24" and found.reasons[-1].startswith(
        "make train PRESET=d24-2xh100 "
    )
    assert "hf_not" not in json.dumps(found.as_json()) and "a" * 40 not in json.dumps(
        found.as_json()
    )
    again, _ = planned_again(load, {}, found.reasons[-1])
    assert (again.preset, again.run_name, again.weight_decay) == ("d24-2xh100", "mine", 0.05)
    assert again.last_step * again.batch_tokens == row(found, "d24").tokens_within


def test_a_lower_rate_is_asked_for_of_larger_models_only(load: Load) -> None:
    for cards, larger in (("64xa100-80gb-sxm", True), ("2xrtx4090", False)):
        c, fleet = load(
            {"PRESET": "xlarge-8xa100", "CARDS": cards, "SWEEP": "depth", "TARGET_HOURS": "100"}
        )
        found = swept(c, fleet)
        best = row(found, found.recommended or "")
        assert found.recommended != "as set" and (best.parameters > parameters(c).total) == larger
        assert ("larger models want a lower one" in found.reasons[-1]) == larger


def test_of_a_begun_run_the_hours_are_of_what_is_left(load: Load, tmp_path: Path) -> None:
    base = D16 | {"RUNS_DIR": str(tmp_path), "RUN_NAME": "half"}
    whole = swept(*load(base, {"SWEEP": "gpus"}))
    made = tmp_path / "half" / "checkpoints" / "step_0009000"
    made.mkdir(parents=True)
    (made / "MANIFEST.json").touch()
    found = swept(*load(base, {"SWEEP": "gpus"}))
    assert (
        "hours: of what is left behind step 9,000" in found.title
        and "step 9,000" not in whole.title
    )
    for one, before in zip(found.rows, whole.rows, strict=True):
        # of 25 evaluations 17 are made; the twenty times of the end are not
        c, fleet = load(base, as_given(one.typed), as_given(one.fits_with or ""))
        assert one.hours == pytest.approx(hours_of(c, fleet, None, 9000))
        assert (one.hours or 0) < 0.4 * (before.hours or 0)
    made.rename(made.with_name("step_0012800"))  # at its end: of the whole
    assert swept(*load(base, {"SWEEP": "gpus"})) == whole


def test_another_depth_is_another_run(load: Load, tmp_path: Path) -> None:
    base = D16 | {"RUNS_DIR": str(tmp_path), "RUN_NAME": "half", "SWEEP": "depth"}
    before = swept(*load(base))
    made = tmp_path / "half" / "checkpoints" / "step_0009000"
    made.mkdir(parents=True)
    (made / "MANIFEST.json").touch()
    found = swept(*load(base))
    assert found.rows == before.rows
    assert (
        "All from their first step, not from step 9,000: another depth is another run"
        in found.title
    )


def test_depths_are_the_family_of_the_presets(load: Load) -> None:
    """Parameters and tokens as the presets' own files have them; d18 by hand: width 1,152 = 9 heads of 128, an MLP of
    3,072; 65,536 rows of embedding and head."""
    found = swept(*load(D16, {"SWEEP": "1"}))
    assert [one.label for one in found.rows] == [
        "d12",
        "d14",
        "d16",
        "d18",
        "d20",
        "d24",
        "d28",
        "d32",
    ]
    assert [row(found, f"d{depth}").parameters for depth in (16, 20, 24, 32)] == [
        336_630_784,
        564_322_560,
        880_885_248,
        1_887_578_112,
    ]
    assert [row(found, f"d{depth}").tokens for depth in (20, 32)] == [
        11_286_347_776,
        37_751_357_440,
    ]
    width = 18 * 64
    each = 4 * width**2 + 3 * width * 3072 + 2 * width + 256
    assert row(found, "d18").parameters == 2 * 65_536 * width + 18 * each + width
    assert row(found, "d18").typed.startswith("N_LAYER=18 N_HEAD=9 N_EMBD=1152 TRAIN_TOKENS=")
    assert row(found, "d20").typed.startswith("PRESET=d20-2xh100")


def test_what_is_read_in_the_hours_that_there_are(load: Load) -> None:
    """As many tokens as the hours allow and not one step more, typed with the model."""
    found = swept(*load(D16, {"SWEEP": "depth", "TARGET_HOURS": "10"}))
    assert found.within_hours == 10
    for one in found.rows:
        c, fleet = load(D16, as_given(one.typed_within))
        assert c.last_step * c.batch_tokens == one.tokens_within
        longer = dataclasses.replace(c, train_tokens=c.train_tokens + c.batch_tokens)
        assert hours_of(c, fleet, None) <= 10 < hours_of(longer, fleet, None)
        assert one.loss_within == pytest.approx(
            expected_loss(parameters(c).total, one.tokens_within), abs=1e-12
        )


def test_the_labs_question(load: Load) -> None:
    """On 2 H100, depth 16 took them 4.3 hours, and they recommended depth 20 for its 6 hours and 33 GB: at 20 tokens a
    parameter it takes three times as long, 12.4 by the preset's 45%, and in the 4.3 hours it ends above depth 16."""
    c, fleet = load(D16, {"SWEEP": "depth", "MFU": "45"})
    found = swept(c, fleet)
    d16, d20 = row(found, "d16"), row(found, "d20")
    assert d20.hours == pytest.approx(12.4, abs=0.2) and d16.hours == pytest.approx(4.2, abs=0.1)
    assert d20.loss < d16.loss - 0.1 and d20.loss_within > d16.loss_within + 0.02
    assert found.recommended == "d16"
    words = " ".join(found.reasons)
    assert (
        "Recommended: d16. Of the models that memory holds none comes notably further in the 4:16 h"
        in words
    )
    assert "Larger? Yes, with more time: none reads 20 tokens a parameter in 4:16 h" in words
    assert (
        "d20 takes 12:28 h for that, 2.92 times as long" in words and "It is what is set." in words
    )


def test_rows_of_different_mfu_are_named_as_such(load: Load) -> None:
    """As presets state it: 43.8 for d16, 50.3 for d24; 42 is known of the card for d18, which no preset has."""
    found = swept(*load({"PRESET": "d16-2xh100", "SWEEP": "depth"}))
    assert [row(found, name).mfu_percent for name in ("d16", "d18", "d24")] == [43.8, 42.0, 50.3]
    assert "MFU=45 is one for all" in found.title
    assert "MFU=45 is one for all" not in swept(*load(D16, {"SWEEP": "depth"})).title


def test_with_more_hours_a_larger_model(load: Load) -> None:
    """30 hours: by hand the lowest of the losses in time is d24's; d16 is too far above it to stay."""
    found = swept(*load(D16, {"SWEEP": "depth", "TARGET_HOURS": "30"}))
    losses = {one.label: one.loss_within for one in found.rows}
    near = {label for label, loss in losses.items() if loss <= min(losses.values()) + 0.01}
    assert "d16" not in near
    assert found.recommended == min(near, key=lambda label: int(label[1:]))
    picked = row(found, found.recommended)
    words = " ".join(found.reasons)
    assert f"Recommended: {found.recommended}." in words and "TARGET_HOURS=30" in words
    assert "Larger? Yes: d20 is through with 20 tokens a parameter in" in words
    assert picked.typed_within in words and (
        "PRESET=" in picked.typed_within or "LEARNING_RATE=0.003 was" in words
    )


def test_what_another_size_would_have_saved(load: Load) -> None:
    """75 tokens a parameter, three times the law's best: 13% of the compute, by test_scaling's search. Depth 16 at 20
    is close enough to its own best for nothing to be said."""
    words = " ".join(swept(*load(XLARGE, {"SWEEP": "depth"})).reasons)
    assert (
        "as set reads 74.8 tokens a parameter, and the law has 22 as the best for its size: 13% less"
        in words
    )
    assert "which cost more to use" in words
    assert "tokens a parameter, and the law has" not in " ".join(
        swept(*load(D16, {"SWEEP": "depth"})).reasons
    )


def test_text_that_repeats_counts_for_less(load: Load) -> None:
    """The standard library has 3.5 million tokens of training text: 20 for each of d12's parameters repeat it 500
    times and more, which is worth 16.4 passes, and the larger models can learn no more from it than that either."""
    settings = {"PRESET": "tiny", "DATA_MIX": "python-stdlib:1"}
    found = swept(*load(settings, {"CARDS": "cpu", "SWEEP": "depth"}))
    d12, d32 = row(found, "d12"), row(found, "d32")
    for one in (d12, d32):
        assert one.tokens > 500 * 3_515_000
        assert one.loss == pytest.approx(
            expected_loss(one.parameters, 16.387756 * 3_515_000), abs=1e-6
        )


def test_what_does_not_fit_is_not_recommended(load: Load) -> None:
    """On a card of 16 GB the largest do not fit, or only with less; if nothing does it says so."""
    base = {"PRESET": "d32-8xh100", "CARDS": "1xt4", "DTYPE": "float32", "SWEEP": "depth"}
    found = swept(*load(base))
    assert row(found, "d32").fits_with is None and row(found, "d12").fits
    assert found.recommended and row(found, found.recommended).fits_with is not None
    assert "Larger?" in " ".join(found.reasons)
    tight = [dataclasses.replace(one, capacity_bytes=1.0, fits_with=None) for one in found.rows]
    none = advice.on_depths(*load(base), tight, tight[0], 5.0)
    assert none.recommended is None and none.reasons[0].startswith(
        "None: memory holds none of these"
    )


def test_without_a_speed_the_largest_that_fits(load: Load) -> None:
    found = swept(*load({"PRESET": "tiny", "CARDS": "cpu", "SWEEP": "depth"}))
    assert found.within_hours is None and all(one.hours is None for one in found.rows)
    held = [one for one in found.rows if one.fits_with is not None]
    assert found.recommended == max(held, key=lambda one: one.parameters).label
    assert "how long it takes is not known here" in found.reasons[0] and "n/a" in text(found)


def test_cards_by_target_hours_or_by_their_cost(load: Load) -> None:
    found = swept(*load(XLARGE, {"SWEEP": "gpus"}))
    one, eight = row(found, "1 GPU, ddp"), row(found, "8 GPUs, ddp")
    assert one.hours == pytest.approx(8 * eight.hours) and one.gpu_hours == pytest.approx(
        eight.gpu_hours
    )
    two_nodes = row(found, "16 GPUs on 2 nodes, ddp")
    # a ring of two nodes over 25 Gbit/s: 1.336e9 weights x 4 bytes leave each, 1.7 s beside 1.9 of computing
    assert two_nodes.waiting == pytest.approx(1.71 / (1.71 + 1.94), abs=0.01)
    assert found.recommended == "8 GPUs, ddp"
    assert (
        swept(*load(XLARGE, {"SWEEP": "gpus", "TARGET_HOURS": "420"})).recommended == "4 GPUs, ddp"
    )
    none = swept(*load(XLARGE, {"SWEEP": "gpus", "TARGET_HOURS": "20"}))
    assert none.recommended is None and "None is through in TARGET_HOURS=20" in none.reasons[0]


def test_the_labs_four_sites_beside_one_node(load: Load) -> None:
    """Eight A100 at four universities are slower than two of them alone; in one node they are as fast as eight are."""
    found = swept(*load(XLARGE, {"SWEEP": "gpus", "NODES": "4", "SITES": "4"}))
    spread, two = row(found, "8 GPUs on 4 nodes at 4 sites, ddp"), row(found, "2 GPUs, ddp")
    assert spread.waiting == pytest.approx(0.94, abs=0.01) and spread.hours > 4 * two.hours
    assert found.recommended == "8 GPUs, ddp" and "NODES=1 SITES=1" in " ".join(found.reasons)


def test_muon_is_exchanged_where_weights_are_split(load: Load) -> None:
    found = swept(*load(D16, {"SWEEP": "gpus"}))
    assert all(("OPTIMIZER=adamw" in one.typed) == (one.parallel == "fsdp") for one in found.rows)


def test_there_is_nothing_to_compare(load: Load) -> None:
    with pytest.raises(SettingsError, match="say which card"):
        swept(*load({"PRESET": "tiny", "CARDS": "cpu", "SWEEP": "gpus"}))


@pytest.mark.parametrize("kind", ["depth", "gpus"])
def test_on_one_screen_and_as_json(load: Load, kind: str) -> None:
    found = swept(*load({"PRESET": "d32-8xh100", "CARDS": "2xa100-40gb-sxm", "SWEEP": kind}))
    lines = text(found).splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) <= 48
    marked = [line for line in lines if line.startswith("* ")]
    assert (
        len(marked) == 1 and sum(line[:2] in ("* ", "  ") for line in lines) == len(found.rows) + 1
    )
    known = json.loads(json.dumps(found.as_json()))
    assert known["recommended"] == found.recommended and len(known["rows"]) == len(found.rows)
    assert [one["fits"] for one in known["rows"]] == [one.fits for one in found.rows]


def test_what_the_law_knows_nothing_of_is_not_compared(load: Load) -> None:
    """3.3M parameters are a twentieth of the smallest that it was fitted to, and three steps of d12 would have a
    loss of 13.7, where a guess among 65,536 has 11.1."""
    found = swept(
        *load({"PRESET": "tiny", "CARDS": "cpu", "SWEEP": "depth"}),
        Probe("cpu", 0.0, "", {"float32": 0.1}),
    )
    assert row(found, "as set").loss is None and row(found, "d12").loss is not None
    assert (
        found.recommended == "as set"
        and "the law knows nothing, so it is what is set" in found.reasons[0]
    )
    short = swept(*load(D16, {"SWEEP": "depth", "TARGET_HOURS": "0.01"}))
    assert row(short, "d12").tokens_within == 3 * 524_288 and row(short, "d12").loss_within is None
    assert short.recommended == "d16" and not any(
        "n/a" in reason or "inf" in reason for reason in short.reasons
    )


def test_a_type_that_a_card_lacks_is_refused(load: Load) -> None:
    with pytest.raises(
        SettingsError, match="t4 has no bfloat16 units; what would do: DTYPE=float32"
    ):
        swept(*load(D16, {"CARDS": "1xt4", "SWEEP": "depth"}))


def test_without_a_speed_it_says_what_to_type(load: Load) -> None:
    found = swept(
        *load({"PRESET": "d16-2xh100", "CARDS": "cpu", "DEVICE": "cpu", "SWEEP": "depth"})
    )
    best = row(found, found.recommended or "")
    assert found.reasons[-1].startswith(f"make train {best.typed} {best.fits_with or ''}".rstrip())
