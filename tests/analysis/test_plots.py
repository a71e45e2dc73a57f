"""`python -m analysis.plots`: what it reads, writes where and reports; tables compared with values worked out by hand."""

import base64
import json
import os
import sys
from pathlib import Path

import pytest

from analysis.plots import main
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
        assert main([]) == 0
        written = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
        assert written == [*(f"{stem}{kind}.csv" for kind in TABLES), *drawn]
    for kind, text in TABLES.items():
        assert Path(f"{stem}{kind}.csv").read_text() == text
    figure, page = (Path(name).read_bytes() for name in drawn)
    assert b"7.123" in page and figure[:4] == b"\x89PNG"
    assert base64.b64encode(figure) in page  # for browsers without JavaScript


def test_several_runs_are_drawn_together_and_a_missing_one_stops_no_other(monkeypatch, capsys):
    for name in ("one", "two"):
        write_record(Path("runs", name), RECORDS)
    monkeypatch.setenv("RUNS_DIR", str(Path("runs").absolute()))
    assert main(["o*", "runs/two", "gone", "--output", "both.png"]) == 78
    printed = capsys.readouterr()
    assert "gone cannot be read (No such file" in printed.err
    assert printed.out.endswith("both.png\n")
    dots_per_m = round(300 / 0.0254).to_bytes(4, "big")
    assert b"pHYs" + dots_per_m in Path("both.png").read_bytes()  # for print
    assert len([*Path("runs").rglob("plots/loss_curves.html")]) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 64, "RUN_NAME=no/slash"),
        (["gone"], 64, "RUN_NAME=no/slash"),
        (["--outputs", "x"], 64, "unrecognized arguments: --outputs"),
        (["one", "--output", "x.txt"], 64, "must end in .html, .png, .pdf, .svg"),
        (["empty"], 78, "has no step"),
        (["one"], 78, "plots cannot be written (File exists)"),
        (["--help"], 0, ""),
    ],
)
def test_exit_codes(monkeypatch, capsys, arguments, code, words):
    write_record(Path("empty"), RECORDS[:1])
    (write_record(Path("one"), RECORDS) / "plots").write_text("a file in the way")
    monkeypatch.setenv("RUN_NAME", "no/slash")
    assert main(arguments) == code
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
    assert main([]) == 0
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


OURS = "step={}/100 loss={} lr={:.3e} step_ms=100.0 tokens_per_s={} mfu=n/a tokens={} left=0:12\n"
EVAL = "step=9/100 val_loss=3.5 val_bpb=1.25 scored_tokens=4096 eval_s=1.0\n"


def write_log(name, speed=40960):
    """A log of five of our own lines, the last with this speed, last written at 2025-11-21 10:00:00 UTC."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    speeds = [40960] * 4 + [speed]
    lines = [
        OURS.format(step, 4 - step / 100, step / 5000, speed, 4096 * step)
        for step, speed in enumerate(speeds, 1)
    ]
    path.write_text("".join(lines) + EVAL)
    os.utime(path, (1763719200, 1763719200))


def find_tables():
    return [path.read_text().splitlines() for path in sorted(Path().rglob("training_*.csv"))]


def test_tables_of_our_own_log():
    write_log("logs/a.log")
    assert main(["logs"]) == 0
    steps, evals = find_tables()
    assert steps[0] == ("step,loss,grad_norm,lrm,dt_ms,tok_per_sec,mfu,total_time_min,lr,tokens")
    assert steps[4] == "4,3.96,,0.8,100,40960,,,0.0008,16384"
    assert evals == ["step,val_loss,val_bpb,scored_tokens,eval_s", "9,3.5,1.25,4096,1"]
    assert Path("logs/plots/loss_curves.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--output", "out"], ["out/loss_curves.html", "out/loss_curves.png"]),
        (["--output", "new/p.html"], ["new/p.html"]),
        (["--output", "x.pdf"], ["x.pdf"]),
        ([], ["logs/plots/loss_curves.html", "logs/plots/loss_curves.png"]),
        (["--check", "--output", "x.pdf"], []),
    ],
)
def test_output_is_a_page_a_figure_or_a_folder(arguments, names):
    write_log("logs/a.log")
    assert main(["logs/a.log", *arguments]) == 0
    drawn = {str(path) for path in Path().rglob("*.*") if path.suffix != ".csv"}
    assert drawn == {"logs/a.log", *names}


def test_check_prints_by_how_much_numbers_differ_and_writes_nothing(capsys):
    write_log("logs/a.log", 45056)
    line = "step {:05d}/9 (0.08%) | loss: 3.0 | dt: 60000.00ms | tok/sec: 1,000 | total time: {}m\n"
    minutes = enumerate(("1.00", "2.00", "3.50"))
    Path("logs/b.log").write_text("".join(line.format(*numbers) for numbers in minutes))
    step = {"event": "step", "loss": 4.0, "tokens_per_s": 40960.0, "tokens": 1}
    records = [{**step, "step": i, "step_ms": 100.0 + 25 * (i == 9)} for i in range(1, 10)]
    write_record(Path("logs/run"), records)
    assert main(["logs", "--check"]) == 0
    printed = capsys.readouterr().out
    batch = "tokens/s x step time = 4,096 tokens a step"
    assert f"a: {batch} (median of 5); largest deviation 10.000% at step 5" in printed
    assert f"run: {batch} (median of 9); largest deviation 25.000% at step 9" in printed
    assert "b: total time grows by the step time on 1 of 2 steps" in printed
    assert "largest deviation 30.00 s at step 2" in printed
    assert len([*Path().rglob("*.*")]) == 3


def test_what_cannot_be_read_is_named_and_the_rest_is_done(monkeypatch, capsys):
    write_log("logs/a.log")
    write_log("logs/closed/b.log")
    Path("crash.log").write_text("starting\nRuntimeError: CUDA out of memory\n")
    whole = Path.iterdir

    def list_folder(path):
        if path.name == "closed":
            raise PermissionError(13, "Permission denied")
        return whole(path)

    monkeypatch.setattr(Path, "iterdir", list_folder)
    assert main(["logs", "absent.log"]) == 78
    errors = capsys.readouterr().err
    assert "logs/closed cannot be read (Permission denied)" in errors
    assert "absent.log cannot be read (No such file" in errors
    assert len(find_tables()) == 2
    assert main(["crash.log"]) == 78
    printed = capsys.readouterr()
    assert "no step; its last error: RuntimeError: CUDA out of memory" in printed.out
    assert "no training step was found" in printed.err and not Path("plots").exists()


def test_what_links_lead_to_again_is_read_once():
    write_log("logs/run-7/output.log")
    for name, target in (("latest-run", "run-7"), ("all", "."), ("itself.log", "itself.log")):
        Path("logs", name).symlink_to(target)
    assert main(["logs", "logs/latest-run/output.log"]) == 0
    assert len(find_tables()) == 2


def test_steps_without_a_number_have_a_table_and_no_curve(capsys):
    Path("a.log").write_text("{'loss': 2.5, 'epoch': 0.5}\n{'loss': 2.25, 'epoch': 1.0}\n")
    assert main(["a.log"]) == 78
    assert "was not drawn: no run has numbered steps" in capsys.readouterr().err
    assert find_tables()[0][1:] == [",2.5,,,,,,,0.5", ",2.25,,,,,,,1"]


def test_hostile_lines_are_printed_as_text_and_the_rest_is_drawn(capsys):
    write_log("logs/a.log")
    text = "step 1 of mine | loss: 3\x1b]0;evil\x07\n" + "{" * 9000 + "\n"
    text += f"val loss 1e99999\niter {'1' * 400}: loss 3.5, time 251.30ms, mfu 31.20%\n"
    Path("logs/b.log").write_text(text)
    Path("logs/\udcff.log").write_text("")
    Path("logs/trainer_state.json").write_text("[" * 99_999)
    assert main(["logs"]) == 0
    assert "loss: 3\\x1b]0;evil\\x07" in capsys.readouterr().out


def test_odd_entries_of_a_trainer_state_are_left_out_and_counted(capsys):
    good = [{"step": step, "loss": 5 - step / 10} for step in (10, 20, 30)]
    good.append({"step": 30, "eval_loss": 1.5, "eval_runtime": 2, "epoch": 1})
    good.append({"step": 30, "train_runtime": 9})
    odd = [{"loss": 1.0}, "text", None, {"step": None, "loss": 1.0}, {"step": 40, "loss": [1.0]}]
    path = Path("trainer_state.json")
    path.write_text(json.dumps({"log_history": [*odd, *good], "max_steps": 45}))
    assert main([path.name]) == 0
    printed = capsys.readouterr().out
    assert "5 entries without a step or a loss were left out" in printed
    assert "complete; the last step in the log is 30 of 45" in printed
    steps, evals = find_tables()
    assert [row.split(",")[:2] for row in steps[1:]] == [["10", "4"], ["20", "3"], ["30", "2"]]
    assert evals == ["step,eval_s,val_loss,epoch", "30,2,1.5,1"]
    for content in ([1], {"log_history": 7}, 3):
        path.write_text(json.dumps(content))
        assert main([path.name]) == 78
        assert "has no log_history" in capsys.readouterr().out


def test_files_are_written_where_nobody_reads_what_is_printed(monkeypatch):
    write_log("logs/a.log")
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        assert main(["logs"]) == 0
