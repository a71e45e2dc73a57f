"""Groups of runs and verdicts: by chance, by hand, and as a user sees them."""

import json
import math

import numpy as np
import pytest

from analysis import compare, groups
from analysis.groups import find_differences, group_runs, judge
from analysis.runs import RunError
from tests.analysis.made_runs import make_eval, make_run, write_run


def test_runs_are_grouped_by_their_names_without_the_seed():
    names = ("b-seed2", "a", "b-seed1", "b_seed10", "b-s1", "b-seed1-long", "seed1", "a-seed3")
    grouped = group_runs(map(make_run, names))
    assert {group: len(runs) for group, runs in grouped.items()} == {
        "b": 3,
        "a": 2,
        "b-s1": 1,
        "b-seed1-long": 1,
        "seed1": 1,
    }


@pytest.mark.parametrize("seeds", [(2, 2), (2, 8), (3, 3, 3)], ids=str)
def test_at_most_6_percent_of_runs_that_differ_by_their_seed_alone_are_told_apart(seeds):
    rng = np.random.default_rng(0)
    decided = 0
    for _ in range(1000):
        values = {str(group): 3.5 + rng.normal(0, 0.01, count) for group, count in enumerate(seeds)}
        decided += judge(values, "nats")[0].p < 0.05
    assert decided <= 60


def test_a_verdict_depends_on_the_other_pairs_and_says_when_it_is_none():
    doubtful = {"a": [1.0, 1.1], "b": [1.2, 1.31], "c": [1.5, 1.58]}  # a and c alone have p = 0.02
    verdicts = judge({name: np.array(losses) for name, losses in doubtful.items()}, "nats")
    assert min(verdict.p for verdict in verdicts) > 0.05
    assert all(verdict.words.startswith("Not decided: ") for verdict in verdicts)


@pytest.mark.filterwarnings("ignore:Precision loss")
def test_losses_that_a_log_has_rounded_decide_nothing():
    rounded = {"a": np.array([3.5, 3.5]), "b": np.array([3.6, 3.6]), "c": np.array([9, 9.01])}
    verdicts = judge(rounded, "nats")
    assert [verdict.p < 0.05 for verdict in verdicts] == [True, True, False]
    assert (verdicts[2].better, verdicts[2].worse) == ("a", "b")


def curve(name, step_ms, points, **facts):
    evals = [make_eval(step, loss, full) for step, loss, full in points]
    return make_run(name, [3.0] * 40, evals, step_ms=step_ms, **facts)


TOKENS = "validation loss (nats per token) at 30,000 tokens"
TIME = "validation loss (nats per token) after 0:30"


def test_losses_are_interpolated_at_equal_tokens_and_time_and_never_between_kinds():
    short = curve("short", 1000, [(10, 5.0, False), (30, 4.0, False), (30, 9.0, True)])
    points = [(10, 5.0, False), (20, 3.0, False), (40, 1.0, False), (40, 9.0, True)]
    comparison = groups.compare(group_runs([short, curve("long", 2000, points)]))
    # at step 30 of both, and after 30 s at step 15 of the long run
    assert comparison.rows == [
        {"": "short", "seeds": "1", TOKENS: "4.0000", TIME: "4.0000", "tokens/s": "1,000"},
        {"": "long", "seeds": "1", TOKENS: "2.0000", TIME: "4.0000", "tokens/s": "500"},
    ]


def test_without_a_common_evaluation_training_losses_are_compared():
    early = curve("early", 1000, [(10, 4.0, False)])
    late = curve("late", 1000, [(20, 3.0, False)])
    rows = groups.compare(group_runs([early, late])).rows
    assert rows[0]["smoothed training loss (nats per token) at 40,000 tokens"] == "3.0000"
    slow = curve("slow", 2000, [(10, 4.0, False)])
    losses = groups.compare(group_runs([early, slow])).losses  # none at equal times
    assert list(losses) == ["validation loss (nats per token) at 10,000 tokens"]
    comparison = groups.compare(group_runs([early, make_run("silent", [math.nan])]))
    assert groups.NOTHING in comparison.sentences
    assert list(comparison.rows[0]) == ["", "seeds", "tokens/s"]


def test_logs_are_compared_by_step_and_have_no_settings_that_differ(tmp_path):
    columns = {"tokens": np.full(40, np.nan)}
    log = curve("log", 1000, [(10, 5.0, False), (30, 4.0, False)], columns=columns)
    comparison = groups.compare(group_runs([log, curve("b", 1000, [(20, 3.0, False)])]))
    assert comparison.rows[0]["validation loss (nats per token) at step 20"] == "4.5000"
    for name, layers in {"a-seed1": "4", "a-seed2": "3", "b": "3"}.items():
        write_run(tmp_path / name, 3.0, N_LAYER=layers, SEED=name[-1:].replace("b", "1"))
    runs = compare.read_runs("a*,b", tmp_path)
    comparison = groups.compare(group_runs([log, *runs]))
    assert comparison.differences == {"N_LAYER": {"a": "3/4", "b": "3"}}
    assert comparison.sentences[:3] == [
        "They differ in N_LAYER: 3/4 (a), 3 (b).",
        "Runs of one group have different N_LAYER: they are no seeds.",
        groups.UNKNOWN_TEXT,
    ]
    assert find_differences(group_runs([log, runs[0]])) == {}


def test_a_slash_in_a_value_is_no_second_value(tmp_path):
    write_run(tmp_path / "tiny", 3.0)
    write_run(tmp_path / "tiny-novel", 2.0, DATA="texts/novel.txt")
    comparison = groups.compare(group_runs(compare.read_runs("tiny,tiny-novel", tmp_path)))
    assert comparison.differences["DATA"] == {
        "tiny": "python:1",
        "tiny-novel": "texts/novel.txt",
    }
    assert "DATA_MIX" not in comparison.differences
    assert not any("no seeds" in sentence for sentence in comparison.sentences)


def test_a_default_that_follows_from_another_setting_is_no_difference(tmp_path):
    write_run(tmp_path / "a", 3.0, N_EMBD="128")
    write_run(tmp_path / "b", 3.0, N_EMBD="192")
    write_run(tmp_path / "c", 3.0, N_EMBD="192", MLP_DIM="640")
    differences = find_differences(group_runs(compare.read_runs("a,b", tmp_path)))
    assert differences.keys() == {"N_EMBD"}
    differences = find_differences(group_runs(compare.read_runs("a,b,c", tmp_path)))
    assert differences.keys() == {"N_EMBD", "MLP_DIM"}


def test_bits_per_byte_stand_in_the_table_of_those_that_have_them(tmp_path):
    write_run(tmp_path / "a", 3.0)
    log = curve("log", 1000, [(15, 5.0, True), (18, 4.0, True)])  # nothing in common
    rows = groups.compare(group_runs([*compare.read_runs("a", tmp_path), log])).rows
    assert [row["bits per byte, last evaluation"] for row in rows] == ["1.5000", "n/a"]


def test_a_figure_that_is_given_is_not_proposed(runs, capsys, monkeypatch):
    monkeypatch.setenv("FIGURE", f"{runs}/loss.pdf")
    assert compare.main() == 0
    assert "For a paper" not in capsys.readouterr().out


def test_a_figure_that_cannot_be_drawn_is_not_proposed(runs, capsys, monkeypatch):
    write_run(runs / "a", 3.0)
    other = write_run(runs / "b", 2.0, SEQ_LEN="64") / "metrics.jsonl"
    other.write_text(other.read_text().replace("val_bpb", "unknown"))
    monkeypatch.setenv("RUNS", "a,b")
    assert compare.main() == 0
    assert "For a paper" not in capsys.readouterr().out
    monkeypatch.setenv("FIGURE", f"{runs}/loss.pdf")
    assert compare.main() == 78


@pytest.mark.parametrize(("name", "value"), [("SEED", "2"), ("SEQ_LEN", "64")])
def test_losses_on_other_text_are_not_compared(tmp_path, name, value):
    write_run(tmp_path / "a", 3.0)
    write_run(tmp_path / "b", 2.0, **{name: value})
    comparison = groups.compare(group_runs(compare.read_runs("a,b", tmp_path)))
    is_same = name == "SEED"
    assert (groups.OTHER_TEXT in comparison.sentences) is not is_same
    unit = "nats per token" if is_same else "bits per byte"
    heading = f"validation loss on the full set ({unit}) at 20,000 tokens"
    assert comparison.rows[0][heading] == ("3.5000" if is_same else "1.5000")


def test_one_seed_and_one_seed_twice_decide_nothing(tmp_path):
    seeds = {"a-seed1": "1", "a-seed2": "2", "b-seed1": "1", "b-seed2": "1", "c": "1"}
    for name, seed in seeds.items():
        write_run(tmp_path / name, 3.0, SEED=seed)
    comparison = groups.compare(group_runs(compare.read_runs("*", tmp_path)))
    assert comparison.verdicts == []
    assert "difference from noise: b, c. Train each" in comparison.sentences[-1]


GOLDEN = """\
               validation loss on the
                   full set (nats per     validation loss (nats        bits per byte, last
      seeds   token) at 20,000 tokens     per token) after 0:03                 evaluation  tokens/s
base      3          3.9600 +- 0.0100          3.5850 +- 0.0100           1.7300 +- 0.0050     6,250
muon      3          3.9100 +- 0.0100          3.4100 +- 0.0100           1.7050 +- 0.0050     6,667
wide      2          3.9350 +- 0.0212          3.5600 +- 0.0212           1.7175 +- 0.0106     6,250

muon is better than base by 0.05 nats per token (95%: 0.0177 to 0.0823; Welch's test, p = 0.011).
Not decided: wide is ahead of base by 0.025 nats per token (95%: -0.18 to 0.23; Welch's test, p =
0.64). With these seeds, a difference below 0.21 would not show. This one would take at least 7
seeds each.
Not decided: muon is ahead of wide by 0.025 nats per token (95%: -0.0949 to 0.145; Welch's test, p =
0.64). With these seeds, a difference below 0.12 would not show. This one would take at least 5
seeds each.
They differ in OPTIMIZER: muon (base, wide), adamw (muon).
"""


@pytest.fixture
def runs(tmp_path, monkeypatch):
    for name, losses, optimizer in (
        ("base", (3.45, 3.46, 3.47), "muon"),
        ("muon", (3.4, 3.41, 3.42), "adamw"),
        ("wide", (3.42, 3.45), "muon"),
    ):
        for seed, loss in enumerate(losses):
            step_ms = 160 if optimizer == "muon" else 150
            facts = {"SEED": str(seed), "OPTIMIZER": optimizer}
            write_run(tmp_path / f"{name}-seed{seed}", loss, step_ms, **facts)
    (tmp_path / "compare").mkdir()  # no run, though RUNS=* finds it
    monkeypatch.setenv("MAKE_TARGET", "compare")
    monkeypatch.setenv("MAKE_GOALS", "compare")
    monkeypatch.setenv("RUNS_DIR", str(tmp_path))
    monkeypatch.setenv("RUNS", "*")
    return tmp_path


def test_the_screen_is_as_documented(runs, capsys):
    assert compare.main() == 0
    *lines, last = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == GOLDEN.splitlines()
    assert last.endswith("compare/base-muon-wide.html. For a paper: FIGURE=loss.pdf")
    assert "data:image/png" in (runs / "compare" / "base-muon-wide.html").read_text()


def test_json_has_the_numbers(runs, capsys, monkeypatch):
    monkeypatch.setenv("JSON", "1")
    monkeypatch.setenv("RUNS", "[bc]*, muon*,base-seed1,")
    assert compare.main() == 0
    comparison = json.loads(capsys.readouterr().out)
    verdict = comparison["verdicts"][0]
    assert (verdict["better"], verdict["difference"]) == ("muon", pytest.approx(0.05))
    losses = next(iter(comparison["losses"].values()))
    assert losses["muon"] == pytest.approx([3.9, 3.91, 3.92])


def test_the_figure_is_a_file_of_one_of_three_kinds(runs, capsys, monkeypatch):
    for name, code in (("new/loss.pdf", 0), ("loss.gif", 64), ("folder/", 64), (".pdf", 64)):
        monkeypatch.setenv("FIGURE", f"{runs}/{name}")
        assert compare.main() == code
    assert (runs / "new" / "loss.pdf").read_bytes().startswith(b"%PDF")
    short = curve("a", 1000, [(10, 4.0, False)])  # one evaluation is no curve
    lines = next(groups.read_lines(group_runs([short]), ("tokens",), is_range=True))
    assert lines.curve.column == "loss"


@pytest.mark.parametrize(
    ("names", "code"), [("", 64), ("base-seed1,,a", 64), ("none*", 64), ("damaged", 78)]
)
def test_what_cannot_be_compared_is_named(runs, capsys, monkeypatch, names, code):
    (runs / "damaged").mkdir()
    (runs / "damaged" / "metrics.jsonl").write_text("{}")
    monkeypatch.setenv("RUNS", names)
    assert compare.main() == code
    assert names.split(",")[-1] in capsys.readouterr().err
    (runs / "empty.log").write_text("no step")
    with pytest.raises(RunError, match="no step with a number"):
        compare.read_runs("empty.log", runs)
    write_run(runs / "compare" / "base-seed1", 3.0)
    names = [run.name for run in compare.read_runs(f"base*,{runs}/base*,compare/*", runs)]
    assert names == ["base-seed0", "base-seed1", "base-seed2", "base-seed1_2"]
