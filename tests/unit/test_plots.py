"""`python -m analysis.plots`: what it writes, compared with values worked out by hand from the records."""

import html
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from analysis import page, plots
from analysis.curves import PANELS, drawn_points, smoothed, smoothing_window, state, summary
from analysis.load import load

START = 1763719200.0  # 2025-11-21 10:00:00 UTC

# A run of 4 steps that lost step 3 once. The rate is 1e-3 at its peak, steps take 6 s and the last 12 s.
RECORDS = [
    {"event": "start", "step": 0, "attempt": 0},
    {"event": "step", "step": 1, "tokens": 8192, "loss": 8.5, "grad_norm": 2.5, "lr": 0.0005,
     "step_ms": 6000.0, "tokens_per_s": 1365.25, "mfu": None, "mem_gib": 1.5, "data_wait_s": 0.001},
    {"event": "step", "step": 2, "tokens": 16384, "loss": 7.123456789012345, "grad_norm": 1.25, "lr": 0.001,
     "step_ms": 6000.0, "tokens_per_s": 1365.25, "mfu": 40.5, "mem_gib": 1.5},
    {"event": "eval", "step": 2, "tokens": 16384, "val_loss": 7.25, "val_bpb": 3.0, "scored_tokens": 4096,
     "eval_s": 1.0, "full": False},
    {"event": "checkpoint", "step": 2, "seconds": 0.5, "bytes": 1048576},
    {"event": "step", "step": 3, "tokens": 24576, "loss": 99.0, "grad_norm": 99.0, "lr": 0.0009,
     "step_ms": 99.0, "tokens_per_s": 99.0, "mfu": 99.0},
    {"event": "resume", "step": 2, "attempt": 1},
    {"event": "step", "step": 3, "tokens": 24576, "loss": None, "grad_norm": 1.0, "lr": 0.00075,
     "step_ms": 6000.0, "tokens_per_s": 1365.25, "mfu": 40.25, "mem_gib": 1.75},
    {"event": "nonfinite", "step": 3},
    {"event": "step", "step": 4, "tokens": 32768, "loss": 6.5, "grad_norm": 0.5, "lr": 0.0001,
     "step_ms": 12000.0, "tokens_per_s": 682.625, "mfu": 20.125, "mem_gib": 1.75},
    {"event": "eval", "step": 4, "tokens": 32768, "val_loss": 6.75, "val_bpb": 2.5, "scored_tokens": 65536,
     "eval_s": 9.0, "full": True},
    {"event": "end", "step": 4, "reason": "done"},
]
SETTINGS = {"LEARNING_RATE": 0.001, "TRAIN_TOKENS": 40960, "BATCH_TOKENS": 8192, "MAX_STEPS": None}  # 5 steps

STEPS_CSV = """\
step,loss,grad_norm,lrm,dt_ms,tok_per_sec,mfu,total_time_min,lr,tokens,mem_gib,data_wait_s,time
1,8.5,2.5,0.5,6000.0,1365.25,,0.1,0.0005,8192,1.5,0.001,1763719201.0
2,7.123456789012345,1.25,1.0,6000.0,1365.25,40.5,0.2,0.001,16384,1.5,,1763719202.0
3,,1.0,0.75,6000.0,1365.25,40.25,0.3,0.00075,24576,1.75,,1763719207.0
4,6.5,0.5,0.1,12000.0,682.625,20.125,0.5,0.0001,32768,1.75,,1763719209.0
"""
EVALS_CSV = """\
step,tokens,val_loss,val_bpb,scored_tokens,full,error
2,16384,7.25,3.0,4096,false,
4,32768,6.75,2.5,65536,true,
"""
EVENTS_CSV = """\
event,time,attempt,step,tokens,reason,name,loss,grad_norm,step_ms,from,passed_over,seconds,bytes
start,1763719200.0,0,0,,,,,,,,,,
checkpoint,1763719204.0,,2,,,,,,,,,0.5,1048576
resume,1763719206.0,1,2,,,,,,,,,,
nonfinite,1763719208.0,,3,,,,,,,,,,
end,1763719211.0,,4,,done,,,,,,,,
"""


def write_run(folder: Path, records: list[dict], settings: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"schema": 1, "time": START + i} | record) + "\n" for i, record in enumerate(records)]
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"schema": 1, "event": "st', encoding="utf-8")
    if settings:
        (folder / "config.json").write_text(json.dumps({"settings": settings}), encoding="utf-8")
    return folder


def numbers_of(path: Path) -> dict:
    """What the page draws, read back out of it."""
    text = path.read_text("utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def trace(panel: dict, name: str) -> dict:
    return next(t for t in panel["traces"] if t["name"] == name)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A run of the records above, drawn twice through the command line."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "a<b>&c", RECORDS, SETTINGS)
    assert plots.main([str(folder)]) == 0
    assert plots.main([str(folder)]) == 0
    return folder


# ---------------------------------------------------------------------------------------------------
# CSV
# ---------------------------------------------------------------------------------------------------

def test_the_csv_has_the_kept_steps_in_full_and_empty_cells_where_the_record_is_silent(drawn):
    assert (drawn / "training_20251121_100000.csv").read_text("utf-8") == STEPS_CSV
    assert (drawn / "training_20251121_100000_evals.csv").read_text("utf-8") == EVALS_CSV
    assert (drawn / "training_20251121_100000_events.csv").read_text("utf-8") == EVENTS_CSV


def test_a_second_call_rewrites_its_files_and_adds_none(drawn):
    assert sorted(str(p.relative_to(drawn)) for p in drawn.rglob("*") if p.is_file()) == [
        "config.json", "metrics.jsonl", "plots/loss_curves.html", "plots/loss_curves.png",
        "training_20251121_100000.csv", "training_20251121_100000_evals.csv",
        "training_20251121_100000_events.csv"]


# ---------------------------------------------------------------------------------------------------
# Page
# ---------------------------------------------------------------------------------------------------

def test_the_page_holds_the_recorded_values_exactly(drawn):
    columns = numbers_of(drawn / "plots/loss_curves.html")["columns"]
    assert columns["0.step"] == [1, 2, 3, 4]
    assert columns["0.minutes"] == [0.1, 0.2, 0.3, 0.5]
    assert columns["0.loss"] == [8.5, 7.123456789012345, None, 6.5]
    assert columns["0.tokens_per_s"] == [1365.25, 1365.25, 1365.25, 682.625]
    assert columns["0.lr"] == [0.0005, 0.001, 0.00075, 0.0001]
    assert columns["0.grad_norm"] == [2.5, 1.25, 1.0, 0.5]


def test_the_page_draws_loss_by_step_and_time_throughput_rate_and_gradient_norm(drawn):
    panels = numbers_of(drawn / "plots/loss_curves.html")["panels"]
    assert [(p["traces"][0]["x"], p["traces"][0]["y"]) for p in panels] == [
        ("0.step", "0.loss"), ("0.minutes", "0.loss"), ("0.step", "0.tokens_per_s"), ("0.step", "0.lr"),
        ("0.step", "0.grad_norm")]
    means = [[t["y"] for t in p["traces"] if str(t["y"]).endswith("_mean")] for p in panels]
    assert means == [["0.loss_mean"], ["0.loss_mean"], ["0.tokens_per_s_mean"], [], ["0.grad_norm_mean"]]


def test_the_page_marks_evaluations_at_their_step_and_time_and_the_full_one_otherwise(drawn):
    by_step, by_time, *others = numbers_of(drawn / "plots/loss_curves.html")["panels"]
    for panel, subset_x, full_x in ((by_step, 2, 4), (by_time, 0.2, 0.5)):
        subset, full = trace(panel, "validation"), trace(panel, "validation, full set")
        assert (subset["x"], subset["y"], full["x"], full["y"]) == ([subset_x], [7.25], [full_x], [6.75])
        assert subset["marker"]["symbol"] != full["marker"]["symbol"]
        assert "3 bpb" in subset["hovertemplate"][0]
    assert not any("validation" in t["name"] for p in others for t in p["traces"])


def test_the_page_marks_checkpoints_resumes_and_troubles_in_every_panel(drawn):
    for i, panel in enumerate(numbers_of(drawn / "plots/loss_curves.html")["panels"]):
        at_2, at_3 = (0.2, 0.3) if i == 1 else (2, 3)
        assert trace(panel, "checkpoint")["x"] == trace(panel, "resume")["x"] == [at_2]
        assert trace(panel, "nonfinite")["x"] == [at_3]
        assert "1.0 MiB, 0.50 s" in trace(panel, "checkpoint")["hovertemplate"][0]
        assert "attempt 1" in trace(panel, "resume")["hovertemplate"][0]
        assert [(s["x0"], s["x1"]) for s in panel["layout"]["shapes"]] == [(at_2, at_2)]


def test_the_page_says_what_the_record_says(drawn):
    text = (drawn / "plots/loss_curves.html").read_text("utf-8")
    heads = re.findall("<th>(.*?)</th>", text)
    cells = re.findall("<td class=.*?>(.*?)</td>", text)
    assert dict(zip(heads, cells, strict=True)) == {
        "steps": "4 (1 more taken and lost)", "first loss": "8.5000", "last loss": "6.5000",
        "lowest loss": "6.5000 (step 4)", "validation loss": "6.7500 (step 4, full set)",
        "validation bpb": "2.5000", "tokens": "32,768", "training time": "0.5 min",
        "mean tokens/s": "1,092"}  # 32,768 in 30 s
    assert '<p class="below">complete at step 4</p>' in text


def test_the_page_stands_alone_and_a_run_name_cannot_break_it(drawn):
    from plotly.offline import get_plotlyjs
    text = (drawn / "plots/loss_curves.html").read_text("utf-8")
    assert text.count(get_plotlyjs()) == 1
    ours = text.replace(get_plotlyjs(), "")
    assert not re.search(r"\b(src|href)=|https?:|@import|url\(", ours)
    assert "default-src 'none'" in ours
    assert "prefers-color-scheme: dark" in ours
    assert "<h1>a&lt;b&gt;&amp;c</h1>" in ours
    assert "a<b>" not in ours
    assert "<" not in re.search(r'id="data">(.*?)</script>', ours)[1]  # so nothing in it can end the script


def test_names_of_several_runs_are_shown_literally_and_not_as_plotly_markup(drawn, tmp_path):
    other = write_run(tmp_path / "other %{x}", RECORDS[:5])
    named = {"a</script><b>": load(drawn), "other %{x}": load(other)}
    path = page.write_page(tmp_path / "both.html", list(named.values()), list(named))
    assert "</script><b>" not in path.read_text("utf-8")
    numbers = numbers_of(path)
    names = {t["name"] for t in numbers["panels"][3]["traces"]}
    assert {html.unescape(name) for name in names} == {"a</script><b>: training", "other %{x}: training"}
    assert not any("<b>" in name or "%{" in name for name in names)
    assert numbers["columns"]["0.loss"][0] == 8.5
    assert numbers["columns"]["1.step"] == [1, 2]


def test_a_long_run_is_thinned_and_the_page_says_so(tmp_path, monkeypatch):
    records: list[dict] = [{"event": "step", "step": i, "loss": 5.0, "step_ms": 1.0} for i in range(1, 401)]
    records[122]["loss"] = 50.0
    monkeypatch.setattr(page, "POINTS_DRAWN", 100)
    path = page.write_page(tmp_path / "p.html", [load(write_run(tmp_path / "r", records))], ["r"])
    shown = numbers_of(path)["columns"]["0.step"]
    assert len(shown) <= 100
    assert {1, 123, 400} <= set(shown)
    assert f"Thinned: {len(shown)} of the 400 steps of r are drawn" in path.read_text("utf-8")


# ---------------------------------------------------------------------------------------------------
# Picture
# ---------------------------------------------------------------------------------------------------

def test_the_picture_has_something_in_each_of_its_six_places(drawn):
    from matplotlib.image import imread
    pixels = imread(drawn / "plots/loss_curves.png")[:, :, :3]
    assert pixels.shape == (890, 1500, 3)  # the bar below is 90 high
    inked = (pixels < 0.5).any(axis=2)
    shares = [inked[y:y + 370, x:x + 500].mean() for y in (60, 430) for x in (0, 500, 1000)]
    assert all(0.002 < share < 0.5 for share in shares), shares


def test_the_pictures_learning_rate_rises_and_falls_where_the_record_does(drawn):
    from matplotlib.image import imread
    pixels = imread(drawn / "plots/loss_curves.png")[430:800, :500, :3]  # the fourth panel, one line
    blue = np.abs(pixels - np.array([0, 0x72, 0xB2]) / 255).max(axis=2) < 0.02
    rows, columns = np.nonzero(blue)
    left, right = columns.min(), columns.max()
    at_steps = [round(left + (right - left) * part) for part in (0, 1 / 3, 2 / 3, 1)]
    heights = [rows.max() - rows[columns == x].min() for x in at_steps]
    top = heights[1]  # 0.5, 1, 0.75 and 0.1 of the peak, above 0.1 at the lowest point drawn
    assert [h / top for h in heights] == pytest.approx([0.4 / 0.9, 1, 0.65 / 0.9, 0], abs=0.05)


# ---------------------------------------------------------------------------------------------------
# Numbers behind both
# ---------------------------------------------------------------------------------------------------

def test_the_mean_line_is_centred_and_skips_what_is_not_known():
    values = [8.0, 6.0, 4.0, float("nan"), 2.0, 1.0, 3.0]
    expected = [8.0, (8 + 6 + 4) / 3, (8 + 6 + 4 + 2) / 4, (6 + 4 + 2 + 1) / 4, (4 + 2 + 1 + 3) / 4,
                (2 + 1 + 3) / 3, (2 + 1 + 3) / 3]
    assert smoothed(np.array(values), 5).tolist() == pytest.approx(expected, rel=1e-12)
    assert np.isnan(smoothed(np.full(4, np.nan), 3)).all()
    assert [smoothing_window(steps) for steps in (1, 250, 800, 10**6)] == [5, 5, 17, 501]


def test_thinning_keeps_the_lowest_and_highest_of_every_panel():
    n, random = 100_000, np.random.default_rng(0)
    columns = {key: random.normal(size=n) for key in {p.y for p in PANELS}} | {"step": np.arange(1.0, n + 1)}
    peaks = random.choice(n, 40, replace=False)
    for i, place in enumerate(peaks):
        columns[PANELS[i % len(PANELS)].y][place] = 1e6 if i % 2 else -1e6
    columns["loss"][5000:9000] = np.nan
    chosen = drawn_points(SimpleNamespace(columns=columns))
    assert len(chosen) <= 20_000
    assert (np.diff(chosen) > 0).all()
    kept = [p for i, p in enumerate(peaks) if not np.isnan(columns[PANELS[i % len(PANELS)].y][p])]
    assert {0, n - 1, *kept} <= set(chosen)
    assert len(drawn_points(SimpleNamespace(columns={"step": np.arange(20_000.0)}))) == 20_000


@pytest.mark.parametrize(("records", "words"), [
    (RECORDS, "complete at step 4"),
    ([*RECORDS[:-1], {"event": "end", "step": 4, "reason": "stopped"}], r"stopped at 80\.0% \(step 4 of 5\)"),
    (RECORDS[:-1], r"running as far as the record says, at 80\.0% \(step 4 of 5\); last step recorded "
                   "2025-11-21 10:00:09 UTC"),
    ([*RECORDS, {"event": "resume", "step": 4}], "running as far as the record says"),
])
def test_the_state_follows_the_last_attempts_end(tmp_path, records, words):
    assert re.match(words, state(load(write_run(tmp_path, records, SETTINGS))))


def test_what_is_not_known_is_said_to_be_so(tmp_path):
    run = load(write_run(tmp_path, [{"event": "step", "step": 1, "loss": None}]))
    assert set(summary(run).values()) == {"1", "n/a"}
    assert state(run).startswith("running as far as the record says, at step 1;")


# ---------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------

def test_the_run_of_the_settings_is_drawn_and_its_files_are_named_from_here(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "tiny-s1", RECORDS)
    monkeypatch.setenv("RUNS_DIR", str(tmp_path))
    monkeypatch.setenv("RUN_NAME", "tiny-s1")
    monkeypatch.chdir(tmp_path)
    assert plots.main([]) == 0
    named = capsys.readouterr().out.splitlines()
    assert named == ["tiny-s1/training_20251121_100000.csv", "tiny-s1/training_20251121_100000_evals.csv",
                     "tiny-s1/training_20251121_100000_events.csv", "tiny-s1/plots/loss_curves.html",
                     "tiny-s1/plots/loss_curves.png"]
    assert all(Path(name).stat().st_size > 0 for name in named)


def test_several_runs_are_overlaid_and_a_missing_one_stops_no_other(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "runs/one", RECORDS)
    write_run(tmp_path / "runs/two", RECORDS[:3])
    monkeypatch.chdir(tmp_path)
    code = plots.main(["one", "two", "gone", "--runs-dir", "runs", "--output", "both"])
    said = capsys.readouterr()
    assert code == 78
    assert said.out.splitlines()[-2:] == ["both/loss_curves.html", "both/loss_curves.png"]
    assert said.err == (f"{tmp_path}/runs/gone/metrics.jsonl does not exist: choose another run; "
                        f"in {tmp_path}/runs there is a record of one, two\n")
    columns = numbers_of(tmp_path / "both/loss_curves.html")["columns"]
    assert (columns["0.step"], columns["1.step"]) == ([1, 2, 3, 4], [1, 2])
    assert "0.step" in numbers_of(tmp_path / "runs/two/plots/loss_curves.html")["columns"]


def test_a_run_without_a_step_is_said_so(tmp_path, capsys):
    assert plots.main([str(write_run(tmp_path, RECORDS[:1]))]) == 78
    said = capsys.readouterr()
    assert said.out == ""
    where = tmp_path / "metrics.jsonl"
    assert said.err == f"{where} holds no step yet: call `make plots` again after the first\n"


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    (write_run(tmp_path, RECORDS[:3]) / "plots").write_text("a file in the way")
    assert plots.main([str(tmp_path)]) == 78
    assert f"{tmp_path}/plots cannot be written (File exists)" in capsys.readouterr().err


@pytest.mark.parametrize(("environment", "arguments", "words"), [
    ({"RUN_NAME": "no/slash"}, [], "RUN_NAME=no/slash"),
    ({}, ["--outputs", "x"], "unrecognized arguments: --outputs"),
])
def test_bad_settings_and_arguments_exit_with_64(monkeypatch, capsys, environment, arguments, words):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert plots.main(arguments) == 64
    assert words in capsys.readouterr().err
