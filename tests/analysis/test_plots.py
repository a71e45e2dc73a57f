"""`python -m analysis.plots`: what it writes, compared with values worked out by hand from the records."""

import csv
import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from analysis import picture, plots, tables
from analysis.curves import PANELS, drawn_points, smoothed, smoothing_window, state, summary
from analysis.load import load
from analysis.page import build
from tests.analysis.pages import page_of

START = 1763719200.0  # 2025-11-21 10:00:00 UTC

# A run of 4 steps that lost step 3 once. The rate is 1e-3 at its peak, steps take 6 s and the last 12 s.
RECORDS = [
    {"event": "start", "step": 0, "attempt": 0},
    {
        "event": "step",
        "step": 1,
        "tokens": 8192,
        "loss": 8.5,
        "grad_norm": 2.5,
        "lr": 0.0005,
        "step_ms": 6000.0,
        "tokens_per_s": 1365.25,
        "mfu": None,
        "mem_gib": 1.5,
        "data_wait_s": 0.001,
    },
    {
        "event": "step",
        "step": 2,
        "tokens": 16384,
        "loss": 7.123456789012345,
        "grad_norm": 1.25,
        "lr": 0.001,
        "step_ms": 6000.0,
        "tokens_per_s": 1365.25,
        "mfu": 40.5,
        "mem_gib": 1.5,
    },
    {
        "event": "eval",
        "step": 2,
        "tokens": 16384,
        "val_loss": 7.25,
        "val_bpb": 3.0,
        "scored_tokens": 4096,
        "eval_s": 1.0,
        "full": False,
    },
    {"event": "checkpoint", "step": 2, "seconds": 0.5, "bytes": 1048576},
    {
        "event": "step",
        "step": 3,
        "tokens": 24576,
        "loss": 99.0,
        "grad_norm": 99.0,
        "lr": 0.0009,
        "step_ms": 99.0,
        "tokens_per_s": 99.0,
        "mfu": 99.0,
    },
    {"event": "resume", "step": 2, "attempt": 1},
    {
        "event": "step",
        "step": 3,
        "tokens": 24576,
        "loss": None,
        "grad_norm": 1.0,
        "lr": 0.00075,
        "step_ms": 6000.0,
        "tokens_per_s": 1365.25,
        "mfu": 40.25,
        "mem_gib": 1.75,
    },
    {"event": "nonfinite", "step": 3},
    {
        "event": "step",
        "step": 4,
        "tokens": 32768,
        "loss": 6.5,
        "grad_norm": 0.5,
        "lr": 0.0001,
        "step_ms": 12000.0,
        "tokens_per_s": 682.625,
        "mfu": 20.125,
        "mem_gib": 1.75,
    },
    {
        "event": "eval",
        "step": 4,
        "tokens": 32768,
        "val_loss": 6.75,
        "val_bpb": 2.5,
        "scored_tokens": 65536,
        "eval_s": 9.0,
        "full": True,
    },
    {"event": "end", "step": 4, "reason": "done"},
]
SETTINGS = {
    "LEARNING_RATE": 0.001,
    "TRAIN_TOKENS": 40960,
    "BATCH_TOKENS": 8192,
    "MAX_STEPS": None,
}  # 5 steps

STEPS_CSV = """\
step,loss,grad_norm,lrm,dt_ms,tok_per_sec,mfu,total_time_min,lr,tokens,mem_gib,data_wait_s,time
1,8.5,2.5,0.5,6000.0,1365.25,,0.1,0.0005,8192,1.5,0.001,1763719201.0
2,7.123456789012345,1.25,1.0,6000.0,1365.25,40.5,0.2,0.001,16384,1.5,,1763719202.0
3,,1.0,0.75,6000.0,1365.25,40.25,0.3,0.00075,24576,1.75,,1763719207.0
4,6.5,0.5,0.1,12000.0,682.625,20.125,0.5,0.0001,32768,1.75,,1763719209.0
"""
EVALS_CSV = """\
step,tokens,val_loss,val_bpb,scored_tokens,full,error,core,core_partial,core_margin,core_tasks,val_ppl
2,16384,7.25,3.0,4096,false,,,,,,
4,32768,6.75,2.5,65536,true,,,,,,
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
    lines = [
        json.dumps({"schema": 1, "time": START + i} | record) + "\n"
        for i, record in enumerate(records)
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(lines) + '{"schema": 1, "event": "st', encoding="utf-8"
    )
    if settings:
        (folder / "config.json").write_text(json.dumps({"settings": settings}), encoding="utf-8")
    return folder


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
        "config.json",
        "metrics.jsonl",
        "plots/loss_curves.html",
        "plots/loss_curves.png",
        "training_20251121_100000.csv",
        "training_20251121_100000_evals.csv",
        "training_20251121_100000_events.csv",
    ]


# ---------------------------------------------------------------------------------------------------
# Page
# ---------------------------------------------------------------------------------------------------


def test_the_page_holds_the_recorded_values_exactly(drawn):
    columns = page_of(drawn / "plots/loss_curves.html")["runs"][0]["columns"]
    assert columns["step"] == [1, 2, 3, 4]
    assert columns["tokens"] == [8192, 16384, 24576, 32768]
    assert columns["minutes"] == [0.1, 0.2, 0.3, 0.5]
    assert columns["loss"] == [8.5, 7.123456789012345, None, 6.5]
    assert columns["tokens_per_s"] == [1365.25, 1365.25, 1365.25, 682.625]
    assert columns["mfu"] == [None, 40.5, 40.25, 20.125]
    assert columns["lr"] == [0.0005, 0.001, 0.00075, 0.0001]
    assert columns["grad_norm"] == [2.5, 1.25, 1.0, 0.5]


def test_the_page_draws_loss_by_step_and_time_validation_throughput_mfu_rate_and_gradient_norm(
    drawn,
):
    panels = page_of(drawn / "plots/loss_curves.html")["panels"]
    assert [(p["y"], p["over"], p["smooth"]) for p in panels] == [
        ("loss", "chosen", True),
        ("loss", "other", True),
        ("tokens_per_s", "", True),
        ("mfu", "", True),
        ("lr", "", False),
        ("grad_norm", "", True),
    ]


def test_a_panel_without_any_number_is_left_out_and_the_page_says_so(tmp_path):
    records = [
        {"event": "step", "step": i, "loss": 5.0, "step_ms": 1.0, "mfu": None} for i in (1, 2)
    ]
    path = build.write_page(tmp_path / "p.html", [load(write_run(tmp_path / "r", records))], ["r"])
    assert [p["y"] for p in page_of(path)["panels"]] == ["loss", "loss"]
    assert (
        "Not recorded, so not drawn: Throughput (tokens/s, whole job); MFU (% of peak); Learning rate"
        in path.read_text("utf-8")
    )


def test_the_page_has_evaluations_and_what_happened_with_their_words(drawn):
    run = page_of(drawn / "plots/loss_curves.html")["runs"][0]
    none = {"core": None, "core_partial": None}
    assert run["evals"] == [
        {"step": 2, "val_loss": 7.25, "val_bpb": 3.0, "full": False} | none,
        {"step": 4, "val_loss": 6.75, "val_bpb": 2.5, "full": True} | none,
    ]
    assert run["events"] == [
        {"kind": "checkpoint", "step": 2, "words": "checkpoint, 1.0 MiB, 0.50 s"},
        {"kind": "resume", "step": 2, "words": "resumed, attempt 2"},
        {"kind": "nonfinite", "step": 3, "words": "loss or gradient not finite"},
        {"kind": "end", "step": 4, "words": "end: done"},
    ]


def test_the_page_says_what_the_record_says(drawn):
    text = (drawn / "plots/loss_curves.html").read_text("utf-8")
    heads = re.findall("<th>(.*?)</th>", text)
    cells = [re.sub("<.*?>", "", cell) for cell in re.findall("<td class=.*?>(.*?)</td>", text)]
    assert dict(zip(heads, cells, strict=True)) == {
        "steps": "4 (1 more taken and lost)",
        "first loss": "8.5000",
        "last loss": "6.5000",
        "lowest loss": "6.5000 (step 4)",
        "reduction": "2.0000 (23.5%)",  # 2 of 8.5
        "validation loss": "6.7500 (step 4, full set)",
        "validation bpb": "2.5000",
        "tokens": "32,768",
        "training time": "0.5 min",
        "mean tokens/s": "1,092",  # 32,768 in 30 s
        "mean MFU": "30.25%",
    }  # 40.5 and 40.25 for 6 s each, 20.125 for 12 s
    assert '<p class="below">complete at step 4</p>' in text


def test_a_fine_tuning_has_its_perplexity_in_the_table_and_the_csv(tmp_path):
    records = [
        {"event": "step", "step": 1, "loss": 5.0, "step_ms": 1.0},
        {
            "event": "eval",
            "step": 1,
            "val_loss": 2.5,
            "val_ppl": 12.182493960703473,
            "scored_tokens": 50,
        },
    ]
    run = load(write_run(tmp_path / "r", records))
    evals = next(path for path in tables.write_tables(run) if path.name.endswith("_evals.csv"))
    assert [row["val_ppl"] for row in csv.DictReader(evals.open())] == ["12.182493960703473"]
    text = build.write_page(tmp_path / "p.html", [run], ["r"]).read_text("utf-8")
    heads = re.findall("<th>(.*?)</th>", text)
    cells = [re.sub("<.*?>", "", cell) for cell in re.findall("<td class=.*?>(.*?)</td>", text)]
    assert dict(zip(heads, cells, strict=True))["validation ppl"] == "12.18"


def test_the_page_stands_alone_and_a_run_name_cannot_break_it(drawn):
    text = (drawn / "plots/loss_curves.html").read_text("utf-8")
    assert not re.search(
        r"\b(src|href)=|https?:|@import|url\(|fetch\(|XMLHttpRequest|innerHTML = (?!')", text
    )
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert "<h1>a&lt;b&gt;&amp;c</h1>" in text
    assert "a<b>" not in text
    assert (
        "<" not in re.search(r'id="data">(.*?)</script>', text, re.S)[1]
    )  # so nothing in it can end the script


def test_names_of_several_runs_are_kept_as_they_are(drawn, tmp_path):
    named = ["a</script><b>", "other %{x}"]
    other = write_run(tmp_path / "other", RECORDS[:5])
    path = build.write_page(tmp_path / "both.html", [load(drawn), load(other)], named)
    assert "</script><b>" not in path.read_text("utf-8")
    first, second = page_of(path)["runs"]
    assert [first["name"], second["name"]] == named
    assert (first["columns"]["loss"][0], second["columns"]["step"]) == (8.5, [1, 2])
    assert (first["colour"], first["dash"]) != (second["colour"], second["dash"])


# ---------------------------------------------------------------------------------------------------
# Picture
# ---------------------------------------------------------------------------------------------------


def test_the_picture_has_something_in_each_of_its_places(drawn):
    from matplotlib.image import imread

    pixels = imread(drawn / "plots/loss_curves.png")[:, :, :3]
    assert pixels.shape == (890, 2000, 3)  # the bar below is 90 high
    inked = (pixels < 0.5).any(axis=2)
    shares = [inked[y : y + 370, x : x + 500].mean() for y in (60, 430) for x in (0, 500, 1000)]
    shares.append(inked[60:430, 1500:].mean())
    assert all(0.002 < share < 0.5 for share in shares), shares


def test_the_pictures_learning_rate_rises_and_falls_where_the_record_does(drawn):
    from matplotlib.image import imread

    pixels = imread(drawn / "plots/loss_curves.png")[430:800, :500, :3]  # the fifth panel, one line
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
    expected = [
        8.0,
        (8 + 6 + 4) / 3,
        (8 + 6 + 4 + 2) / 4,
        (6 + 4 + 2 + 1) / 4,
        (4 + 2 + 1 + 3) / 4,
        (2 + 1 + 3) / 3,
        (2 + 1 + 3) / 3,
    ]
    assert smoothed(np.array(values), 5).tolist() == pytest.approx(expected, rel=1e-12)
    assert np.isnan(smoothed(np.full(4, np.nan), 3)).all()
    assert [smoothing_window(steps) for steps in (1, 250, 800, 10**6)] == [5, 5, 17, 501]


def test_thinning_keeps_the_lowest_and_highest_of_every_panel():
    n, random = 100_000, np.random.default_rng(0)
    columns = {key: random.normal(size=n) for key in {p.y for p in PANELS}} | {
        "step": np.arange(1.0, n + 1)
    }
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


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (RECORDS, "complete at step 4"),
        (
            [*RECORDS[:-1], {"event": "end", "step": 4, "reason": "stopped"}],
            r"stopped at 80\.0% \(step 4 of 5\)",
        ),
        (
            RECORDS[:-1],
            r"running as far as the record says, at 80\.0% \(step 4 of 5\); last step recorded "
            "2025-11-21 10:00:09 UTC",
        ),
        ([*RECORDS, {"event": "resume", "step": 4}], "running as far as the record says"),
    ],
)
def test_the_state_follows_the_last_attempts_end(tmp_path, records, words):
    assert re.match(words, state(load(write_run(tmp_path, records, SETTINGS))))


def test_what_is_not_known_is_said_to_be_so(tmp_path):
    run = load(write_run(tmp_path, [{"event": "step", "step": 1, "loss": None}]))
    said = summary(run)
    assert said.pop("last loss") == "not finite"  # the only thing that null can mean of a loss
    assert set(said.values()) == {"1", "n/a"}
    assert state(run).startswith("running as far as the record says, at step 1;")


# ---------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------


def test_the_run_of_the_settings_is_drawn_and_its_files_are_named_from_here(
    tmp_path, monkeypatch, capsys
):
    write_run(tmp_path / "tiny-s1", RECORDS)
    monkeypatch.setenv("RUNS_DIR", str(tmp_path))
    monkeypatch.setenv("RUN_NAME", "tiny-s1")
    monkeypatch.chdir(tmp_path)
    assert plots.main([]) == 0
    named = capsys.readouterr().out.splitlines()
    assert named == [
        "tiny-s1/training_20251121_100000.csv",
        "tiny-s1/training_20251121_100000_evals.csv",
        "tiny-s1/training_20251121_100000_events.csv",
        "tiny-s1/plots/loss_curves.html",
        "tiny-s1/plots/loss_curves.png",
    ]
    assert all(Path(name).stat().st_size > 0 for name in named)


def test_several_runs_are_overlaid_and_a_missing_one_stops_no_other(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "runs/one", RECORDS)
    write_run(tmp_path / "runs/two", RECORDS[:3])
    monkeypatch.chdir(tmp_path)
    code = plots.main(["one", "two", "gone", "--runs-dir", "runs", "--output", "both"])
    said = capsys.readouterr()
    assert code == 78
    assert said.out.splitlines()[-2:] == ["both/loss_curves.html", "both/loss_curves.png"]
    assert said.err == (
        f"{tmp_path}/runs/gone/metrics.jsonl does not exist: choose another run; "
        f"in {tmp_path}/runs there is a record of one, two\n"
    )
    both = [run["columns"]["step"] for run in page_of(tmp_path / "both/loss_curves.html")["runs"]]
    assert both == [[1, 2, 3, 4], [1, 2]]
    assert len(page_of(tmp_path / "runs/two/plots/loss_curves.html")["runs"]) == 1


@pytest.mark.filterwarnings("error::UserWarning")  # panels that have no room are one
@pytest.mark.parametrize("count", [2, 12, 13, 35])
def test_the_names_of_few_runs_and_of_many_are_all_in_the_picture(tmp_path, monkeypatch, count):
    from matplotlib.figure import Figure

    write, figures = Figure.savefig, []
    monkeypatch.setattr(
        Figure, "savefig", lambda self, path: (figures.append(self), write(self, path))
    )
    run = dataclasses.replace(
        load(write_run(tmp_path, RECORDS)), goodput=None
    )  # as of a log: no bars below
    picture.write_picture(
        tmp_path / "p.png", [run] * count, [f"a run with number {i}" for i in range(count)]
    )
    (figure,) = figures
    (legend,) = [
        found
        for axes in figure.axes
        if (found := axes.get_legend()) and len(found.get_texts()) == count
    ]
    boxes = [text.get_window_extent() for text in legend.get_texts()]
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    assert all(figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1 for box in boxes)
    panels = [axes.get_window_extent() for axes in figure.axes if axes.get_title(loc="left")]
    assert len(panels) > 5 and not any(box.overlaps(panel) for box in boxes for panel in panels)
    assert min(panel.height for panel in panels) > 250  # of 400


def test_static_draws_a_picture_for_print_and_nothing_else(tmp_path, capsys):
    from matplotlib.image import imread

    assert plots.main([str(write_run(tmp_path, RECORDS)), "--static"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path}/plots/loss_curves.png"]
    assert imread(tmp_path / "plots/loss_curves.png").shape[1] == 20 * 300
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == [
        "loss_curves.png",
        "metrics.jsonl",
    ]


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


@pytest.mark.parametrize(
    ("environment", "arguments", "words"),
    [
        ({"RUN_NAME": "no/slash"}, [], "RUN_NAME=no/slash"),
        ({}, ["--outputs", "x"], "unrecognized arguments: --outputs"),
    ],
)
def test_bad_settings_and_arguments_exit_with_64(
    monkeypatch, capsys, environment, arguments, words
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert plots.main(arguments) == 64
    assert words in capsys.readouterr().err
