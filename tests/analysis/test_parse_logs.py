"""The command line, and make plots with LOG_DIR: what is written where, and what is said."""

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis import curves, parse_logs, plots
from analysis.logs import log_check
from analysis.logs.log_runs import drawn, read_log
from bench import log_reading, pages, run
from settings.config import Config
from tests.analysis.conftest import DIALECTS
from tests.analysis.pages import page_of

OURS = "step={}/100 loss={} lr={} grad_norm=0.5 step_ms=100.0 tokens_per_s=40960 mfu=n/a mem_gib=1.00 tokens={} left=0:12\n"
EVAL = "step={}/100 val_loss=3.5 val_bpb=1.25 scored_tokens=4096 eval_s=1.0\n"


def ours(first: int, last: int, clock: str = "") -> str:
    return "".join(
        clock + OURS.format(s, 4 - s / 100, f"{1e-3 * min(1, s / 10):.3e}", 4096 * s)
        for s in range(first, last + 1)
    )


def at(path: Path, text: str, mtime: int = 1763719200) -> Path:
    """A log that was last written at 2025-11-21 10:00:00 UTC."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (mtime, mtime))
    return path


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_our_own_lines_have_the_columns_that_our_record_has(tmp_path: Path) -> None:
    at(tmp_path / "logs/train.log", ours(1, 20, "2025-11-20 09:08:07,123 ") + EVAL.format(20))
    assert parse_logs.main(["--log-dir", str(tmp_path / "logs"), "--csv"]) == 0
    (steps, evals) = sorted((tmp_path / "logs").glob("*.csv"))
    assert (steps.name, evals.name) == (
        "training_20251120_090807.csv",
        "training_20251120_090807_evals.csv",
    )
    lines = rows(steps)
    assert list(lines[0])[:8] == [
        "step",
        "loss",
        "grad_norm",
        "lrm",
        "dt_ms",
        "tok_per_sec",
        "mfu",
        "total_time_min",
    ]
    assert [
        lines[4][key]
        for key in (
            "step",
            "loss",
            "lrm",
            "dt_ms",
            "tok_per_sec",
            "mfu",
            "total_time_min",
            "tokens",
        )
    ] == ["5", "3.95", "0.5", "100", "40960", "", "", "20480"]
    assert rows(evals) == [
        {"step": "20", "val_loss": "3.5", "val_bpb": "1.25", "scored_tokens": "4096", "eval_s": "1"}
    ]


def test_runs_of_the_same_second_have_files_of_their_own_and_a_second_call_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at(tmp_path / "a.log", ours(1, 5) + ours(1, 6))
    at(tmp_path / "deep/b.log", ours(1, 7))
    for _ in range(2):
        assert parse_logs.main([str(tmp_path), "--csv"]) == 0
    said = capsys.readouterr().out
    named = {path.name: len(rows(path)) for path in tmp_path.glob("*.csv")}
    assert named == {
        "training_20251121_100000.csv": 5,
        "training_20251121_100000_2.csv": 6,
        "training_20251121_100000_3.csv": 7,
    }
    assert "without a clock: CSVs are named by the time" in said and "100000_2.csv  a #2\n" in said


def test_a_run_folder_is_read_by_its_record_and_its_logs_are_not_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs/mine"
    at(folder / "train.log", ours(1, 3))
    records = [
        {"event": "start", "step": 0},
        {"event": "step", "step": 1, "loss": 4.0, "lr": 1e-3, "step_ms": 60000.0, "tokens": 10},
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"schema": 1, "time": 1763719200.0} | record) + "\n" for record in records
        )
    )
    assert (
        parse_logs.main(
            [str(tmp_path / "logs"), "--csv", "--output", str(tmp_path / "out/page.html")]
        )
        == 0
    )
    assert "a run of this repository, 1 steps" in capsys.readouterr().out
    (line,) = rows(tmp_path / "out/training_20251121_100000.csv")
    assert (line["total_time_min"], line["lrm"]) == ("1.0", "1.0")
    assert (tmp_path / "out/page.html").is_file() and not list(folder.glob("*.csv"))


def test_the_page_shows_logs_and_smooths_no_mean_again(tmp_path: Path) -> None:
    line = (
        "step {:05d}/00300 (0.08%) | loss: {:.6f} | lrm: 1.00 | dt: 50.00ms | tok/sec: 1,000 | mfu: 43.80 | "
        "total time: 1.00m"
    )
    at(tmp_path / "nano.log", "".join(line.format(s, 3 + (s % 2)) + "\n" for s in range(200)))
    assert parse_logs.main([str(tmp_path / "nano.log")]) == 0
    page = (tmp_path / "loss_curves.html").read_text("utf-8")
    (run,) = page_of(tmp_path / "loss_curves.html")["runs"]
    assert (
        run["loss_is"].startswith("a mean over the last steps")
        and run["columns"]["loss"] == [3, 4] * 100
    )
    assert "stopped at 66.7% (step 199 of 300)" in page and "was not smoothed again" in page


def test_evaluations_that_print_bits_per_byte_alone_have_not_failed(tmp_path: Path) -> None:
    at(
        tmp_path / "a.log",
        "".join(
            f"step {s:05d}/9 (0.08%) | loss: 3.000000 | dt: 50.00ms | tok/sec: 1,000 | total time: 1.00m\n"
            + (f"Step {s:05d} | Validation bpb: {1 - s / 10:.4f}\n" if s % 2 else "")
            for s in range(6)
        ),
    )
    assert parse_logs.main([str(tmp_path / "a.log")]) == 0
    data = page_of(tmp_path / "loss_curves.html")
    assert data["marks"] == {} and [e["val_loss"] for e in data["runs"][0]["evals"]] == [None] * 3
    assert [e["val_bpb"] for e in data["runs"][0]["evals"]] == [0.9, 0.7, 0.5]
    assert [p["title"] for p in data["panels"] if p.get("kind")] == ["Validation, bits per byte"]


def test_a_restart_of_a_log_is_marked_where_it_goes_on(tmp_path: Path) -> None:
    at(tmp_path / "a.log", ours(1, 9) + ours(6, 12))
    assert parse_logs.main([str(tmp_path / "a.log")]) == 0
    (run,) = page_of(tmp_path / "loss_curves.html")["runs"]
    assert [(event["kind"], event["step"]) for event in run["events"]] == [("resume", 6)]


def test_static_draws_a_picture_and_no_page(tmp_path: Path) -> None:
    at(tmp_path / "a.log", ours(1, 5))
    assert parse_logs.main([str(tmp_path / "a.log"), "--static"]) == 0
    assert (tmp_path / "loss_curves.png").read_bytes()[:4] == b"\x89PNG"
    assert not list(tmp_path.glob("*.html")) and not list(tmp_path.glob("*.csv"))


def test_check_writes_nothing_and_says_by_how_much_numbers_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faster = OURS.format(10, 3.0, "1e-3", 4096 * 10).replace(
        "tokens_per_s=40960", "tokens_per_s=45056"
    )
    at(tmp_path / "a.log", ours(1, 9) + faster)
    assert parse_logs.main([str(tmp_path), "--check"]) == 0
    said = capsys.readouterr().out
    assert (
        "tokens/s x step time = 4,096 tokens a step (median of 10); largest deviation 10.000% at step 10"
        in said
        and "tokens grow by 4,096 a step (median of 9); largest deviation 0 " in said
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a.log"]


def test_total_time_is_checked_step_by_step(tmp_path: Path) -> None:
    line = "step {:05d}/9 (0.08%) | loss: 3.000000 | dt: {:.2f}ms | tok/sec: 1,000 | total time: {:.2f}m\n"
    path = at(
        tmp_path / "a.log",
        line.format(0, 60000, 1) + line.format(1, 60000, 2) + line.format(2, 60000, 3.5),
    )
    (found,) = [
        words
        for words in log_check.checks(read_log(path, DIALECTS).runs[0])
        if "total time" in words
    ]
    assert "on 1 of 2 steps" in found and "largest deviation 30.00 s at step 2" in found


def test_what_cannot_be_read_is_named_and_the_rest_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at(tmp_path / "a.log", ours(1, 5))
    at(tmp_path / "crash.log", "starting\nRuntimeError: CUDA out of memory\n")
    assert (
        parse_logs.main(
            [
                str(tmp_path / "a.log"),
                str(tmp_path / "absent.log"),
                str(tmp_path / "crash.log"),
                "--csv",
            ]
        )
        == 78
    )
    said = capsys.readouterr()
    assert "absent.log cannot be read (No such file" in said.err
    assert "without steps; its last error: RuntimeError: CUDA out of memory" in said.out
    assert len(list(tmp_path.glob("training_*.csv"))) == 1
    assert parse_logs.main([str(tmp_path / "crash.log")]) == 78
    assert "no training step was found" in capsys.readouterr().err
    assert parse_logs.main(["--log-dir", str(tmp_path / "misspelt"), "--csv"]) == 78
    assert (
        "misspelt cannot be read" in capsys.readouterr().err
        and not (tmp_path / "misspelt").exists()
    )
    assert parse_logs.main([]) == 64 and "name a log" in capsys.readouterr().err


def test_make_plots_takes_a_folder_of_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at(tmp_path / "a.log", ours(1, 5))
    monkeypatch.setenv("LOG_DIR", str(tmp_path))
    assert plots.main([]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.log",
        "loss_curves.html",
        "loss_curves.png",
        "training_20251121_100000.csv",
    ]


def test_a_run_of_a_log_has_all_that_page_and_picture_ask_for(tmp_path: Path) -> None:
    path = at(tmp_path / "a.log", ours(1, 5))
    made = drawn(read_log(path, DIALECTS).runs[0], "a", tmp_path, 5.0)
    assert (made.goodput, made.last_step, made.started, made.lost_steps) == (None, 100, 5.0, 0)
    assert made.minutes_at(3) == 0.0  # the log does not say


def test_the_bench_reads_every_step_of_the_logs_it_makes() -> None:
    found = list(log_reading.measure(1, size=300_000))
    assert [row["kind"] for row in found] == list(log_reading.KINDS)
    assert all(row["rows"] >= 600 and row["rounds"][0]["mb_s"] > 1 for row in found)
    assert re.match(
        r"\| nanochat, 0 MB \| [0-9,]+ \| [0-9]+ \([0-9]+-[0-9]+\) \| 40 \|",
        log_reading.row(found[0], run.spread),
    )
    assert list(run.cells(Config(bench_shapes="logs"), on_gpu=False)) == []


def test_the_bench_makes_pages_of_its_log_and_of_its_record() -> None:
    found = list(pages.measure(1, steps=500))
    assert [row["kind"] for row in found] == list(pages.MAKERS)
    assert all(
        row["page_bytes"] > 10_000 and row["peak_mib"] > 20 and row["bytes"] > 50_000
        for row in found
    )
    assert re.match(
        r"\| of a log, 500 steps \| 0 \| 0\.\d \| \d+\.\d \(\d+\.\d-\d+\.\d\) \| 10 \| \d+ \| ",
        pages.row(found[0], run.spread),
    )


# ---------------------------------------------------------------------------------------------------
# What is given, and what cannot be read
# ---------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_read_is_named_and_the_rest_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As another user meets it; who runs the tests may read everything."""
    at(tmp_path / "a.log", ours(1, 5))
    at(tmp_path / "closed/b.log", ours(1, 6))
    at(tmp_path / "open/c.log", ours(1, 7))
    whole = Path.iterdir

    def listed(path: Path) -> Iterator[Path]:
        if path.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return whole(path)

    monkeypatch.setattr(Path, "iterdir", listed)
    assert parse_logs.main([str(tmp_path), "--csv"]) == 78
    assert f"{tmp_path / 'closed'} cannot be read (Permission denied)" in capsys.readouterr().err
    assert [len(rows(path)) for path in sorted(tmp_path.glob("*.csv"))] == [5, 7]


def test_what_links_lead_to_again_is_read_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at(tmp_path / "wandb/run-7/output.log", ours(1, 5))
    (tmp_path / "wandb/latest-run").symlink_to("run-7")
    (tmp_path / "wandb/all").symlink_to(".")
    (tmp_path / "wandb/itself.log").symlink_to("itself.log")
    given = [str(tmp_path), str(tmp_path / "wandb"), str(tmp_path / "wandb/latest-run/output.log")]
    assert parse_logs.main([*given, "--csv"]) == 0
    assert [len(rows(path)) for path in tmp_path.glob("*.csv")] == [5]
    assert (
        f"{tmp_path / 'wandb/run-7/output.log'}: 1 run\n" in capsys.readouterr().out
    )  # under its own name


def test_output_is_a_page_a_picture_or_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(at(tmp_path / "a.log", ours(1, 5)))
    (tmp_path / "out.d").mkdir()
    for more, name in (((), "loss_curves.html"), (("--static",), "loss_curves.png")):
        assert parse_logs.main([log, "--output", str(tmp_path / "out.d"), *more]) == 0
        assert (tmp_path / "out.d" / name).is_file()
    assert parse_logs.main([log, "--csv", "--check", "--output", str(tmp_path / "new/p.htm")]) == 0
    assert (tmp_path / "new/p.htm").is_file() and len(list((tmp_path / "new").glob("*.csv"))) == 1
    capsys.readouterr()
    for name, more in (("p.txt", ()), ("p", ("--csv",)), ("p.png", ()), ("p.html", ("--static",))):
        assert parse_logs.main([log, "--output", str(tmp_path / name), *more]) == 64
        said = capsys.readouterr()
        assert (
            "ends in .png" in said.err
            if more == ("--static",)
            else "ends in .html or .htm" in said.err
        )
        assert said.out == "" and not (tmp_path / name).exists()


def test_check_looks_at_our_own_record_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        {
            "event": "step",
            "step": s,
            "loss": 4.0,
            "lr": 1e-3,
            "step_ms": 100.0 if s < 9 else 125.0,
            "tokens_per_s": 40960.0,
            "tokens": 4096 * s,
        }
        for s in range(1, 10)
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"schema": 1, "time": 1763719200.0} | record) + "\n" for record in records
        )
    )
    assert parse_logs.main([str(tmp_path), "--check"]) == 0
    said = capsys.readouterr().out
    assert "4,096 tokens a step (median of 9); largest deviation 25.000% at step 9" in said
    assert (
        "tokens grow by 4,096 a step (median of 8); largest deviation 0 " in said
        and "total time" not in said
    )


def test_a_page_of_runs_without_numbers_is_refused_and_their_csv_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at(tmp_path / "a.log", "{'loss': 2.5, 'epoch': 0.5}\n{'loss': 2.25, 'epoch': 1.0}\n")
    for more in ((), ("--static",), ("--csv",)):
        assert parse_logs.main([str(tmp_path), *more]) == 78
        assert "was not drawn: no run has numbered steps" in capsys.readouterr().err
    assert [len(rows(path)) for path in tmp_path.glob("*.csv")] == [2]
    assert parse_logs.main([str(tmp_path), "--check"]) == 0


def test_odd_entries_of_a_trainer_state_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [{"step": s, "loss": 5 - s / 10, "learning_rate": 1e-4} for s in (10, 20, 30)]
    odd = [
        {"loss": 1.0},
        "text",
        None,
        {"step": None, "loss": 1.0},
        {"step": 40, "loss": [1.0]},
        {"step": float("nan"), "loss": 1.0},
        {"step": 50, "loss": "much"},
    ]
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": [*odd, *good], "max_steps": "many"}))
    assert parse_logs.main([str(path), "--csv"]) == 0
    assert "7 entries of its log_history" in capsys.readouterr().out
    assert [row["loss"] for row in rows(next(tmp_path.glob("*.csv")))] == ["4", "3", "2"]
    for content in ([1], {"log_history": {"step": 1}}, {"log_history": 7}, 3):
        path.write_text(json.dumps(content))
        assert parse_logs.main([str(path)]) == 78
        assert "has no log_history" in capsys.readouterr().out


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-be"])
def test_a_log_in_utf_16_is_read(
    tmp_path: Path, coding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Überschrift ☃\r\n" + ours(1, 400).replace("\n", "\r\n")
    path = tmp_path / "a.log"
    path.write_bytes((b"\xfe\xff" if coding == "utf-16-be" else b"") + text.encode(coding))
    monkeypatch.setattr("analysis.logs.log_file.BLOCK", 1001)  # in the middle of a letter
    (run_,) = read_log(path, DIALECTS).runs
    assert run_.columns["step"].tolist() == list(range(1, 401))


def test_files_are_written_where_nobody_reads_what_is_said(tmp_path: Path) -> None:
    for i in range(20):
        at(tmp_path / f"{i}.log", ours(1, 5))
    reading, writing = os.pipe()
    os.close(reading)
    call = [sys.executable, "-m", "analysis.parse_logs", str(tmp_path), "--csv"]
    done = subprocess.run(call, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(tmp_path.glob("*.csv"))) == 20 and (tmp_path / "loss_curves.html").is_file()


@pytest.mark.parametrize(("bad", "shown"), [("nan", "nan"), ("inf", "inf"), ("-nan", "nan")])
def test_a_run_that_diverged_is_said_to_have_done_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: str, shown: str
) -> None:
    line = "iter {}: loss {}, time 251.30ms, mfu 31.20%\n"
    losses = {s: f"{10 - s / 100:.4f}" if s < 200 else bad for s in range(0, 300, 10)}
    at(tmp_path / "a.log", "".join(line.format(s, loss) for s, loss in losses.items()))
    assert parse_logs.main([str(tmp_path), "--csv"]) == 0
    assert "  the loss is not finite on 10 steps, first at step 200\n" in capsys.readouterr().out
    found = curves.summary(
        drawn(read_log(tmp_path / "a.log", DIALECTS).runs[0], "a", tmp_path, 5.0)
    )
    assert (found["last loss"], found["reduction"]) == (
        f"{shown} (8.1000 at step 190 before)",
        "n/a",
    )
    assert (
        "a: the loss is not finite on 10 steps, first at step 200"
        in (tmp_path / "loss_curves.html").read_text()
    )
    at(tmp_path / "b.log", "".join(line.format(s, bad) for s in range(3)))
    found = curves.summary(
        drawn(read_log(tmp_path / "b.log", DIALECTS).runs[0], "b", tmp_path, 5.0)
    )
    assert (found["first loss"], found["last loss"], found["reduction"]) == ("n/a", shown, "n/a")
