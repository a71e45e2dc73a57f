"""Real logs of other trainers, against counts and invariants that share no code with the parser.

The oracle is a line-by-line look with str.split and float, and what each trainer's numbers imply of one another.
"""

import csv
import gzip
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from analysis import parse_logs
from analysis.logs.log_runs import drawn, read_log, state
from analysis.logs.log_tables import write_log_tables
from tests.analysis.conftest import DIALECTS

Real = Callable[[str], Path]


def fields(line: str) -> dict[str, str]:
    """Of a line of nanochat: what stands behind each colon, as text."""
    return dict(part.split(": ", 1) for part in line.split(" | ")[1:] if ": " in part)


def nanochat_lines(path: Path) -> list[str]:
    return [
        line
        for line in path.read_text("utf-8", "replace").split("\n")
        if line.startswith("step 0") and " | dt: " in line
    ]


def test_a_resumed_run_keeps_its_last_attempt_and_counts_what_was_lost(real: Real) -> None:
    path = real("nanochat_resumed.log")
    last: dict[int, str] = {}
    lines = nanochat_lines(path)
    for line in lines:
        last[int(line[5:10])] = line
    (run,) = read_log(path, DIALECTS).runs
    assert run.columns["step"].tolist() == sorted(last) == list(range(1800, 4846))
    for column, key, unit in (
        ("loss", "loss", ""),
        ("grad_norm", "grad norm", ""),
        ("lrm", "lrm", ""),
        ("step_ms", "dt", "ms"),
        ("tokens_per_s", "tok/sec", ""),
        ("mfu", "mfu", ""),
        ("minutes", "total time", "m"),
    ):
        expected = [
            float(fields(last[s])[key].removesuffix(unit).replace(",", "")) for s in sorted(last)
        ]
        assert run.columns[column].tolist() == expected
    (back,) = run.backs
    assert (back.reached, back.to, back.rows) == (
        4623,
        4600,
        len(lines) - len(last),
    ) and back.rows == 24
    assert state(run) == "stopped at 22.6% (step 4,845 of 21,400)"
    batch = run.columns["tokens_per_s"] * run.columns["step_ms"] / 1000
    assert np.abs(batch - 524288).max() <= 192
    assert (
        np.abs(np.diff(run.columns["minutes"]) * 60 - run.columns["step_ms"][1:] / 1000).max() < 0.6
    )
    assert run.evals["val_bpb"].tolist() == [
        float(line.split(": ")[1])
        if "bpb" in line
        else run.evals["val_bpb"][1 if "02000" in line else 10]
        for line in path.read_text("utf-8", "replace").split("\n")
        if line.startswith("Step 0")
    ]


@pytest.mark.parametrize(
    ("name", "complete", "stopped"),
    [("nanochat_sweep.log", 7, 1), ("nanochat_best_config.log", 1, 0)],
)
def test_many_runs_of_one_file_are_told_apart(
    real: Real, name: str, complete: int, stopped: int
) -> None:
    path = real(name)
    lines = nanochat_lines(path)
    runs = read_log(path, DIALECTS).runs
    assert [run.complete for run in runs].count(True) == complete
    assert [run.complete for run in runs].count(False) == stopped
    assert len(runs) == sum("step 00000/" in line for line in lines)
    assert [loss for run in runs for loss in run.columns["loss"]] == [
        float(fields(line)["loss"]) for line in lines
    ]
    finals = re.findall(r"Minimum validation bpb: ([0-9.]+)", path.read_text("utf-8", "replace"))
    assert [run.evals["val_bpb"][-1] for run in runs if run.complete] == [
        float(text) for text in finals
    ]
    for run in runs:
        assert (
            np.abs(run.columns["tokens_per_s"] * run.columns["step_ms"] / 1000 / 262144 - 1).max()
            < 5e-4
        )


def test_a_log_without_steps_has_its_last_error(real: Real) -> None:
    log = read_log(real("nanochat_d20.log"), DIALECTS)
    assert (log.runs, log.error) == (
        [],
        "base_train.py: error: unrecognized arguments: --models base",
    )


def test_each_step_of_modded_nanogpt_and_its_average_time(real: Real) -> None:
    (run,) = read_log(real("modded_nanogpt_2025-09_fa3.log"), DIALECTS).runs
    step = run.columns["step"]
    assert step.tolist() == list(range(1, 1671)) and run.complete
    assert np.abs(run.columns["minutes"] * 60_000 / step - run.columns["step_avg_ms"]).max() < 0.51
    assert (run.evals["step"][-1], run.evals["val_loss"][-1], len(run.evals["step"])) == (
        1670,
        3.2755,
        15,
    )
    assert "loss" not in run.columns  # it prints none between evaluations
    (old,) = read_log(real("modded_nanogpt_2024-06_adamw.log"), DIALECTS).runs
    assert old.columns["step"].tolist() == list(range(9536))
    assert (old.columns["loss"][-1], old.evals["val_loss"][-1], len(old.evals["step"])) == (
        3.340180,
        3.275959,
        76,
    )


def test_megatron_lines_without_a_loss_have_none(real: Real) -> None:
    (run,) = read_log(real("megatron_gpt2.log"), DIALECTS).runs
    with_numbers = drawn(run, "r", Path("."), 0.0).columns
    assert with_numbers["step"].tolist() == list(range(10, 100, 10))
    assert math.isnan(with_numbers["loss"][0]) and with_numbers["loss"][1:3].tolist() == [
        12.49319,
        32.82511,
    ]
    assert np.isnan(with_numbers["grad_norm"]).tolist() == [True, True] + 7 * [False]
    assert (run.columns["samples"] == 4 * run.columns["step"]).all()
    assert state(run) == "stopped at 9.0% (step 90 of 1,000)" and "CANCELLED" in run.error


@pytest.mark.parametrize(
    ("name", "dialect", "steps", "column", "values"),
    [
        (
            "llmc_stdout_excerpt.log",
            "llmc",
            [1, 2, 3, 4, 21],
            "loss",
            [11.007906, 10.829729, 10.543671, 10.277939, 9.094215],
        ),
        (
            "torchtitan_excerpt.log",
            "torchtitan",
            [1, 10, 20, 30, 40, 50, 100],
            "tokens_per_s_gpu",
            [1689, 11023, 11572, 11601, 11527, 11481, 11572],
        ),
        ("nanotron_excerpt.log", "nanotron", [1, 2, 10, 15], "step_ms", [4710, 11.8, 673, 9.41]),
        ("olmo_excerpt.log", "olmo", [1, 2, 3], "loss", [11.25, 10.73, 10.64]),
        ("nanogpt_excerpt.log", "nanogpt", [340, 350, 360, 370, 380, 390], "mfu", 6 * [0.96]),
        (
            "hf_trainer_state.json",
            "hugging_face",
            [10, 20, 30, 40],
            "lr",
            [0.00016, 0.00011555555555555555, 7.111111111111112e-05, 2.6666666666666667e-05],
        ),
        (
            "litgpt_excerpt.log",
            "litgpt",
            list(range(1, 11)),
            "optimizer_step",
            [0, 1, 1, 2, 2, 3, 3, 4, 4, 5],
        ),
    ],
)
def test_excerpts_have_the_numbers_that_a_person_reads_in_them(
    real: Real, name: str, dialect: str, steps: list[int], column: str, values: list[float]
) -> None:
    (run,) = read_log(real(name), DIALECTS).runs
    assert (run.dialect.name, run.columns["step"].tolist()) == (dialect, steps)
    assert run.columns[column].tolist() == values


def test_an_unknown_mfu_is_empty_and_a_line_cut_short_is_counted(real: Real) -> None:
    log = read_log(real("llmc_stdout_excerpt.log"), DIALECTS)
    assert "mfu" not in log.runs[0].columns
    assert log.not_understood == 1 and "2449.6" in log.notes[0]
    assert log.runs[0].evals["val_loss"].tolist() == [11.006021]


def test_fourteen_runs_of_a_diary_and_fine_tuning(real: Real) -> None:
    diary = read_log(real("build_nanogpt.log"), DIALECTS)
    assert [len(run.columns["step"]) for run in diary.runs] == 13 * [50] + [100]
    (tuned,) = read_log(real("nanochat_sft.log"), DIALECTS).runs
    assert tuned.columns["step"].tolist() == list(range(50, 30001, 50)) and tuned.complete


def wrapped(lines: list[bytes], how: str) -> bytes:
    """The same lines as they come out of other tools."""
    ends = b"\r\n" if how == "crlf" else b"\n"
    before = {
        "kubectl": b"[pod/run-0-x7k2p/trainer] 2026-01-02T03:04:05.678901234Z ",
        "torchrun": b"[default0]:[rank0]:",
        "logging": b"2026-01-02 03:04:05,678 - train - INFO - ",
        "slurm": b"0: ",
        "colour": b"\x1b[32m\x1b[1m",
        "lost escape": b"[32m[1mINFO[0m - ",
        "tqdm": b" 22%|##8       | 10/45 [00:10<00:35,  1.00s/it]\r",
    }
    after = b"\x1b[0m" if how == "colour" else b""
    made = [before.get(how, b"") + line + after + ends for line in lines]
    if how == "doubled":
        made = [line for line in made for _ in range(2)]
    if how == "utf-8 cut":
        made = ["░███".encode()[:7] + ends, *made]
    return b"".join(made)


@pytest.mark.parametrize(
    "how",
    [
        "kubectl",
        "torchrun",
        "logging",
        "slurm",
        "colour",
        "lost escape",
        "tqdm",
        "crlf",
        "doubled",
        "utf-8 cut",
        "gzip",
    ],
)
def test_a_wrapper_changes_no_number(real: Real, tmp_path: Path, how: str) -> None:
    path = real("nanochat_resumed.log")
    (plain,) = read_log(path, DIALECTS).runs
    text = wrapped(path.read_bytes().split(b"\n")[:-1], how)
    other = tmp_path / "wrapped.log"
    other.write_bytes(gzip.compress(text, 1) if how == "gzip" else text)
    log = read_log(other, DIALECTS)
    (run,) = log.runs
    assert {key: run.columns[key].tolist() for key in plain.columns} == {
        key: column.tolist() for key, column in plain.columns.items()
    }
    assert set(run.columns) - set(plain.columns) <= {"time"}
    assert [(b.reached, b.to, b.rows) for b in run.backs] == [(4623, 4600, 24)]
    assert run.repeats == (3070 if how == "doubled" else 0) and log.not_understood == 0


def test_the_csv_is_the_log_again(real: Real, tmp_path: Path) -> None:
    path = real("nanochat_resumed.log")
    (logged,) = read_log(path, DIALECTS).runs
    steps, evals = write_log_tables(drawn(logged, "r", tmp_path, 0.0), logged)
    assert (
        steps.name == "training_20251217_162906.csv"
    )  # the clock of the line before its first step
    with open(steps, newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == [
        "step",
        "loss",
        "grad_norm",
        "lrm",
        "dt_ms",
        "tok_per_sec",
        "mfu",
        "total_time_min",
    ]
    assert rows[1] == ["1800", "3.164064", "0.1466", "1", "35710.56", "14681", "5.18", "866.15"]
    assert len(rows) == 1 + 3046
    assert evals.read_text().splitlines()[:3] == [
        "step,val_bpb,core",
        "2000,0.9457,",
        "2000,,0.1523",
    ]


def test_all_real_logs_make_a_page_and_csvs_that_do_not_overwrite_each_other(
    real: Real, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = real("nanochat_sweep.log").parent
    assert (
        parse_logs.main(
            ["--log-dir", str(folder), "--csv", "--check", "--output", str(tmp_path / "p.html")]
        )
        == 0
    )
    said = capsys.readouterr().out
    files = [
        path for path in tmp_path.glob("training_*.csv") if not path.name.endswith("_evals.csv")
    ]
    assert len(files) == len(set(re.findall(r"^\S+\.csv  .*$", said, re.M))) == 35
    assert (
        "nanochat_sweep.log: 8 runs" in said
        and "nanochat_d20.log: without steps; its last error" in said
    )
    assert "tokens/s x step time = 524,273 tokens a step" in said
