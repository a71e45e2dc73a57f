"""`python -m analysis.parse_logs`: which files it reads, what it writes and what it reports."""

import json
import os
import sys
from pathlib import Path

import pytest

from analysis.parse_logs import main
from bench import log_reading
from tests.analysis.conftest import write_record

OURS = "step={}/100 loss={} lr={:.3e} step_ms=100.0 tokens_per_s={} mfu=n/a tokens={} left=0:12\n"
EVAL = "step=9/100 val_loss=3.5 val_bpb=1.25 scored_tokens=4096 eval_s=1.0\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("logs").mkdir()


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
    assert main(["--log-dir", "logs", "--csv"]) == 0
    steps, evals = find_tables()
    assert steps[0] == ("step,loss,grad_norm,lrm,dt_ms,tok_per_sec,mfu,total_time_min,lr,tokens")
    assert steps[4] == "4,3.96,,0.8,100,40960,,,0.0008,16384"
    assert evals == ["step,val_loss,val_bpb,scored_tokens,eval_s", "9,3.5,1.25,4096,1"]
    assert Path("logs/loss_curves.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--output", "out"], ["out/loss_curves.html", "out/loss_curves.png"]),
        (["--output", "out", "--static"], ["out/loss_curves.png"]),
        (["--output", "new/p.htm", "--check"], ["new/p.htm"]),
        (["--output", "x.pdf"], ["x.pdf"]),
        (["--static"], ["logs/loss_curves.png"]),
    ],
)
def test_output_is_a_page_a_figure_or_a_folder(arguments, names):
    write_log("logs/a.log")
    assert main(["logs/a.log", *arguments]) == 0
    assert {str(path) for path in Path().rglob("*.*")} == {"logs/a.log", *names}


def test_invalid_arguments(capsys):
    for arguments, words in ((["logs", "--output", "p.txt"], "must end in .html"), ([], "name a")):
        assert main(arguments) == 64
        assert words in capsys.readouterr().err


def test_check_prints_by_how_much_numbers_differ_and_writes_nothing(capsys):
    write_log("logs/a.log", 45056)
    line = "step {:05d}/9 (0.08%) | loss: 3.0 | dt: 60000.00ms | tok/sec: 1,000 | total time: {}m\n"
    minutes = enumerate(("1.00", "2.00", "3.50"))
    Path("logs/b.log").write_text("".join(line.format(*numbers) for numbers in minutes))
    step = {"event": "step", "loss": 4.0, "tokens_per_s": 40960.0, "tokens": 1}
    records = [{**step, "step": i, "step_ms": 100.0 + 25 * (i == 9)} for i in range(1, 10)]
    write_record(Path("logs/run"), records)
    assert main(["--log-dir", "logs", "--check"]) == 0
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
    assert main(["logs", "absent.log", "--csv"]) == 78
    errors = capsys.readouterr().err
    assert "logs/closed cannot be read (Permission denied)" in errors
    assert "absent.log cannot be read (No such file" in errors
    assert len(find_tables()) == 2
    assert main(["crash.log"]) == 78
    printed = capsys.readouterr()
    assert "no step; its last error: RuntimeError: CUDA out of memory" in printed.out
    assert "no training step was found" in printed.err


def test_what_links_lead_to_again_is_read_once():
    write_log("logs/run-7/output.log")
    for name, target in (("latest-run", "run-7"), ("all", "."), ("itself.log", "itself.log")):
        Path("logs", name).symlink_to(target)
    assert main(["logs", "logs/latest-run/output.log", "--csv"]) == 0
    assert len(find_tables()) == 2


def test_steps_without_a_number_have_a_table_and_no_curve(capsys):
    Path("a.log").write_text("{'loss': 2.5, 'epoch': 0.5}\n{'loss': 2.25, 'epoch': 1.0}\n")
    assert main(["a.log", "--csv"]) == 78
    assert "was not drawn: no run has numbered steps" in capsys.readouterr().err
    assert find_tables()[0][1:] == [",2.5,,,,,,,0.5", ",2.25,,,,,,,1"]


def test_odd_entries_of_a_trainer_state_are_left_out_and_counted(capsys):
    good = [{"step": step, "loss": 5 - step / 10} for step in (10, 20, 30)]
    good.append({"step": 30, "eval_loss": 1.5, "eval_runtime": 2, "epoch": 1})
    good.append({"step": 30, "train_runtime": 9})
    odd = [{"loss": 1.0}, "text", None, {"step": None, "loss": 1.0}, {"step": 40, "loss": [1.0]}]
    path = Path("trainer_state.json")
    path.write_text(json.dumps({"log_history": [*odd, *good], "max_steps": 45}))
    assert main([path.name, "--csv"]) == 0
    printed = capsys.readouterr().out
    assert "5 entries without a step or a loss were left out" in printed
    assert "complete at step 30 of 45" in printed
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
        assert main(["logs", "--static"]) == 0


def test_the_bench_reads_every_step_of_the_logs_it_makes():
    kinds = [row["kind"] for row in log_reading.measure(1, size=100_000)]
    assert kinds == [*log_reading.KINDS]
