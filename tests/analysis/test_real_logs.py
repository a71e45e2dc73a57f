"""Real logs of other trainers, compared with a reading of their lines by str.split and float."""

import pytest

from analysis.logs.runs import read_log
from analysis.tables import write_tables

COLUMNS = {
    "loss": "loss",
    "grad_norm": "grad norm",
    "lrm": "lrm",
    "step_ms": "dt",
    "tokens_per_s": "tok/sec",
    "mfu": "mfu",
    "minutes": "total time",
}


def read_lines(path):
    """The step and the numbers of each line of nanochat."""
    found = []
    for line in path.read_text("utf-8", "replace").split("\n"):
        if line.startswith("step 0") and " | dt: " in line:
            texts = dict(part.split(": ", 1) for part in line.split(" | ")[1:] if ": " in part)
            numbers = {}
            for key in COLUMNS.values() & texts.keys():
                numbers[key] = float(texts[key].rstrip("ms").replace(",", ""))
            found.append((int(line[5:10]), numbers))
    return found


def test_a_resumed_run_keeps_its_last_attempt_and_its_csv_is_the_log_again(real, tmp_path):
    path = real("nanochat_resumed.log")
    taken = read_lines(path)
    last = dict(taken)
    (run,) = read_log(path).runs
    assert run.columns["step"].tolist() == sorted(last) == list(range(1800, 4846))
    for column, key in COLUMNS.items():
        assert run.columns[column].tolist() == [last[step][key] for step in sorted(last)]
    assert f"{len(taken) - len(last)} step lines lost" in run.remarks[1]
    assert run.state == "stopped at 22.6% (step 4,845 of 21,400)"
    steps, evals = write_tables(run, tmp_path, f"training_{run.stamp}")
    assert steps.name == "training_20251217_162906.csv"  # the last clock before its first step
    header, first, *others = steps.read_text().splitlines()
    assert header == "step,loss,grad_norm,lrm,dt_ms,tok_per_sec,mfu,total_time_min"
    assert first == "1800,3.164064,0.1466,1,35710.56,14681,5.18,866.15" and len(others) == 3045
    assert evals.read_text().splitlines()[:3] == [
        "step,val_bpb,core",
        "2000,0.9457,",
        "2000,,0.1523",
    ]


@pytest.mark.parametrize(
    ("name", "runs", "steps", "evals", "column", "values"),
    [
        ("modded_nanogpt_2025-09_fa3.log", 1, 1670, 15, "step_avg_ms", [97.92]),
        ("modded_nanogpt_2024-06_adamw.log", 1, 9536, 76, "loss", [3.294388, 3.340180]),
        ("nanochat_sweep.log", 8, 30, 7, "loss", [10.535546, 4.248593]),
        ("nanochat_best_config.log", 1, 4, 1, "loss", [4.052596]),
        ("megatron_gpt2.log", 1, 9, 0, "step", [90]),
        ("build_nanogpt.log", 14, 750, 0, "loss", [0.012582]),
        ("nanochat_sft.log", 1, 600, 0, "step", [30000]),
        (
            "llmc_stdout_excerpt.log",
            1,
            5,
            1,
            "loss",
            [10.277939, 9.094215],
        ),
        (
            "torchtitan_excerpt.log",
            1,
            7,
            0,
            "tokens_per_s_gpu",
            [11481, 11572],
        ),
        ("nanotron_excerpt.log", 1, 4, 0, "step_ms", [4710, 11.8, 673, 9.41]),
        ("olmo_excerpt.log", 1, 3, 0, "loss", [10.73, 10.64]),
        ("nanogpt_excerpt.log", 1, 6, 0, "mfu", [0.96]),
        (
            "hf_trainer_state.json",
            1,
            4,
            0,
            "lr",
            [7.111111111111112e-05, 2.6666666666666667e-05],
        ),
        ("litgpt_excerpt.log", 1, 10, 0, "optimizer_step", [4, 4, 5]),
        ("nanochat_d20.log", 0, 0, 0, "loss", []),
    ],
)
def test_logs_have_what_a_person_reads_in_them(real, name, runs, steps, evals, column, values):
    found = read_log(real(name)).runs
    assert len(found) == runs
    assert (
        sum(run.steps for run in found) == steps and sum(len(run.evals) for run in found) == evals
    )
    for run in found[-1:]:
        assert run.columns[column].tolist()[-len(values) :] == values
