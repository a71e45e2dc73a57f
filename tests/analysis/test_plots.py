"""`python -m analysis.plots`: what it writes where, and the tables of a run, compared with values worked out by hand."""

import base64
from pathlib import Path

import pytest

from analysis import plots
from tests.analysis.conftest import write_record

STEP = {"event": "step", "tokens": 8192, "grad_norm": 2.5, "step_ms": 6000.0, "mem_gib": 1.5}
# The run lost step 2 once. The rate is 1e-3 at its peak, steps take 6 s and the last 12 s.
RECORDS = [
    {"event": "start", "step": 0, "attempt": 0},
    {**STEP, "step": 1, "loss": 8.5, "lr": 0.0005, "tokens_per_s": 1365.25, "mfu": None},
    {**STEP, "step": 2, "loss": 99.0},
    {"event": "eval", "step": 1, "val_loss": 7.25, "val_ppl": 12.182493960703473, "full": False},
    {"event": "checkpoint", "step": 1, "seconds": 0.5, "bytes": 1048576},
    {"event": "resume", "step": 1, "attempt": 1},
    {**STEP, "step": 2, "loss": None, "lr": 0.001, "mfu": 40.5},
    {**STEP, "step": 3, "loss": 7.123456789012345, "lr": 0.0001, "step_ms": 12000.0},
    {"event": "end", "step": 3, "reason": "done"},
]
TABLES = {
    "": """\
step,loss,grad_norm,lrm,dt_ms,tok_per_sec,mfu,total_time_min,lr,tokens,mem_gib,data_wait_s,time
1,8.5,2.5,0.5,6000,1365.25,,0.1,0.0005,8192,1.5,,1763719201
2,nan,2.5,1,6000,,40.5,0.2,0.001,8192,1.5,,1763719206
3,7.123456789012345,2.5,0.1,12000,,,0.4,0.0001,8192,1.5,,1763719207
""",
    "_evals": """\
step,tokens,val_loss,val_bpb,scored_tokens,full,error,core,core_partial,core_margin,core_tasks,val_ppl
1,,7.25,,,false,,,,,,12.182493960703473
""",
    "_events": """\
event,time,attempt,step,tokens,reason,name,loss,grad_norm,step_ms,from,passed_over,seconds,bytes
start,1763719200,0,0,,,,,,,,,,
checkpoint,1763719204,,1,,,,,,,,,0.5,1048576
resume,1763719205,1,1,,,,,,,,,,
end,1763719208,,3,,done,,,,,,,,
""",
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_run_has_its_tables_page_and_figure_and_a_second_call_the_same(monkeypatch, capsys):
    write_record(Path("tiny"), RECORDS)
    monkeypatch.setenv("RUNS_DIR", str(Path.cwd()))
    monkeypatch.setenv("RUN_NAME", "tiny")
    stem = "tiny/training_20251121_100000"
    drawn = ["tiny/plots/loss_curves.png", "tiny/plots/loss_curves.html"]
    for _ in range(2):
        assert plots.main([]) == 0
        written = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
        assert written == [*(f"{stem}{kind}.csv" for kind in TABLES), *drawn]
    for kind, text in TABLES.items():
        assert Path(f"{stem}{kind}.csv").read_text() == text
    figure, page = (Path(name).read_bytes() for name in drawn)
    assert b"7.123" in page and figure[:4] == b"\x89PNG"
    assert base64.b64encode(figure) in page  # for browsers without JavaScript


def test_several_runs_are_drawn_together_and_a_missing_one_stops_no_other(capsys):
    for name in ("one", "two"):
        write_record(Path("runs", name), RECORDS)
    arguments = ["one", "two", "gone", "--runs-dir", "runs", "--static", "--output", "both.pdf"]
    assert plots.main(arguments) == 78
    printed = capsys.readouterr()
    assert "runs/gone/metrics.jsonl does not exist: choose another run" in printed.err
    assert printed.out.endswith("both.pdf\n") and Path("both.pdf").read_bytes()[:4] == b"%PDF"
    figures = [path.read_bytes() for path in Path("runs").rglob("plots/loss_curves.png")]
    dots_per_m = round(300 / 0.0254).to_bytes(4, "big")
    assert [b"pHYs" + dots_per_m in figure for figure in figures] == [True, True]
    assert not [*Path().rglob("*.csv"), *Path().rglob("*.html")]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 64, "RUN_NAME=no/slash"),
        (["--outputs", "x"], 64, "unrecognized arguments: --outputs"),
        (["one", "--output", "x.txt"], 64, "must end in .html, .htm, .png, .pdf, .svg"),
        (["empty"], 78, "has no step"),
        (["one"], 78, "plots cannot be written (File exists)"),
        (["--help"], 0, ""),
    ],
)
def test_exit_codes(monkeypatch, capsys, arguments, code, words):
    write_record(Path("empty"), RECORDS[:1])
    (write_record(Path("one"), RECORDS) / "plots").write_text("a file in the way")
    monkeypatch.setenv("RUN_NAME", "no/slash")
    assert plots.main(arguments) == code
    assert words in capsys.readouterr().err


def test_make_plots_reads_a_folder_of_logs_and_writes_next_to_the_page(monkeypatch):
    """The names of tables keep the stamp in the name of a log; other runs are named by their start."""
    text = "2026-01-02 03:04:05 start\n"
    for step in (1, 2, 3):
        text += f"iter {step}: loss 3.5, time 251.30ms, mfu 31.20%\n"
    for name in ("training_20251221_070319.log", "deep/copy_20251221_070319.txt", "b.out"):
        path = Path("logs", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(2 * text if name == "b.out" else text)
    write_record(Path("logs/run"), RECORDS)
    monkeypatch.setenv("LOG_DIR", str(Path.cwd() / "logs"))
    assert plots.main([]) == 0
    kinds = ("20251221_070319", "20260102_030405")
    stems = [f"{kind}{number}" for kind in kinds for number in ("", "_2")]
    stems += [f"20251121_100000{kind}" for kind in TABLES]
    written = {path.name for path in Path("logs/plots").iterdir()}
    assert written == {
        "loss_curves.html",
        "loss_curves.png",
        *(f"training_{stem}.csv" for stem in stems),
    }
    assert len([*Path().rglob("*.csv")]) == 7
