"""What a log has: last lines, nan, several processes, several runs, restarts, evaluations, and odd files."""

import gzip
import math

import pytest
from numpy.testing import assert_array_equal

from analysis.logs.runs import read_log


def nanogpt(step, loss=3.5):
    return f"iter {step}: loss {loss}, time 251.30ms, mfu 31.20%\n"


def llmc(step, total=100, loss="3.500000"):
    return (
        f"step {step:4d}/{total} | loss {loss} (+nanz)| norm 1.2345 (+nanz)| lr 6.00e-04 | 351.20 ms | "
        "-100.0% bf16 MFU | 1492000 tok/s\n"
    )


def lines(line, first, last, *more):
    return "".join(line(step, *more) for step in range(first, last + 1))


def steps_of(log):
    return [run.columns["step"].tolist() for run in log.runs]


def evals_of(log):
    return [{each["step"]: each["val_loss"] for each in run.evals} for run in log.runs]


def test_a_last_line_without_a_line_end_is_left_out_and_reported(read):
    for end in (nanogpt(3)[:-12], nanogpt(3).rstrip()):
        log = read(nanogpt(1) + nanogpt(2) + end)
        assert steps_of(log) == [[1, 2]]
        assert "no line end" in log.notes[0] and "iter 3" in log.notes[0]


def test_nan_and_inf_stay_and_an_unknown_value_is_neither(read):
    losses = ["3.500000", "nan", "inf", "-nan", "n/a"]
    (run,) = read("".join(llmc(step, 100, loss) for step, loss in enumerate(losses, 1))).runs
    loss = run.columns["loss"].tolist()
    assert [math.isnan(value) for value in loss] == [False, True, False, True, True]
    assert loss[2] == math.inf and run.is_not_finite("loss").tolist() == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert "mfu" not in run.not_finite and math.isnan(run.columns["mfu"][0])  # -100.0%


def test_lines_that_look_like_steps_are_counted_and_the_first_shown(read):
    odd = [f"step {i} of my own | training loss = 3.{i}" for i in range(5)]
    glued = "step 9 of my own, loss: 3.1 " + nanogpt(2).strip() + "step 4 | Loss: 3\n"
    log = read(nanogpt(1) + "\n".join(odd) + "\n" + glued)
    assert (
        steps_of(log) == [[1, 2]]
        and "6 lines that look like steps were not understood" in log.notes
    )
    assert log.notes[1:] == [f"not understood: {line}" for line in odd[:3]]


@pytest.mark.parametrize(
    ("first", "then", "lost"),
    [
        ((0, 10), (0, 5), None),  # a new run
        ((1, 10), (1, 5), None),
        ((500, 510), (505, 512), 6),  # resumed at 505
        ((500, 510), (500, 512), 11),  # nothing was saved since
        ((500, 510), (511, 512), 0),  # goes on
    ],
)
def test_a_restart_is_told_from_a_new_run(read, first, then, lost):
    log = read(lines(llmc, *first, 1000, "9.0") + "killed\n" + lines(llmc, *then, 1000, "3.0"))
    again = list(range(then[0], then[1] + 1))
    before = list(range(first[0], first[1] + 1))
    if lost is None:
        assert steps_of(log) == [before, again]
        return
    (run,) = log.runs
    assert run.columns["step"].tolist() == before[: len(before) - lost] + again
    assert run.columns["loss"].tolist()[-len(again) :] == [3.0] * len(again)
    assert (f"{lost} step lines lost" in "".join(run.remarks)) is (lost > 0)
    assert [event["step"] for event in run.events] == [then[0]] * (lost > 0)


def test_another_number_of_steps_or_another_trainer_is_another_run(read):
    log = read(llmc(50) + llmc(51) + llmc(51, 200) + nanogpt(60) + nanogpt(70))
    assert steps_of(log) == [[50, 51], [51], [60, 70]]
    assert steps_of(read(llmc(99) + llmc(100) + llmc(101, 200))) == [[99, 100, 101]]
    assert steps_of(read(llmc(50) + llmc(70, 200) + llmc(71, 200))) == [[50], [70, 71]]
    log = read("".join(map(nanogpt, (10, 20, 30, 10, 20, 20, 30))))  # it prints every tenth
    assert steps_of(log) == [[10, 20, 30]] * 2 and log.notes == ["1 lines were there twice"]


def test_an_error_after_the_end_of_a_run_is_outside_of_it(read):
    line = "step {:05d}/00003 (1%) | loss: 3.0 | dt: 50.00ms | tok/sec: 1,000 | total time: 1.00m\n"
    run = "".join(map(line.format, range(3)))
    end = "Total training time: 2.39m\n"
    errors = "ValueError: first\n", "KeyError: second\n"
    first, last = read(run + end.join(errors) + run + end).runs
    inside, outside = "after its last step: ValueError: first", "after its end: KeyError: second"
    assert first.remarks[1:] == [inside, outside] and not last.remarks[1:]
    assert last.state == "complete at step 2"
    (stopped,) = read(run.replace("/00003", "/00030") + "".join(errors)).runs
    assert stopped.state == "stopped at 10.0% (step 2 of 30)"
    assert stopped.remarks[1:] == ["after its last step: KeyError: second"]


def test_the_lowest_rank_counts_and_pods_are_runs_of_their_own(read):
    steps = range(1, 6)
    log = read("".join(f"[rank{r}]: {llmc(s, 100, f'{r}.5')}" for s in steps for r in (3, 0, 1)))
    assert steps_of(log) == [[*steps]] and log.runs[0].columns["loss"].tolist() == [0.5] * 5
    assert log.notes == ["10 lines of higher ranks were left out: the lowest rank counts"]
    log = read("".join(f"[pod/{p}/trainer] {llmc(s)}" for s in steps for p in ("a-0", "b-0")))
    assert steps_of(log) == [[*steps], [*steps]]
    (run,) = read(lines(llmc, 0, 19) + lines(lambda step: f"[rank0]: {llmc(step)}", 20, 29)).runs
    assert run.steps == 30  # the same process, with a prefix since a restart
    prefixes = ["[rank0]: ", "[rank3]:[W] c10d warns."]  # the other process is rank 3
    log = read("".join(prefixes[s % 2] + llmc(s) for s in range(2, 7)))
    assert steps_of(log) == [[2, 3, 4, 5, 6]]


def test_evaluations_belong_to_their_run_and_what_a_restart_undid_is_gone(read):
    evaluation = "step {}: train loss 3.1, val loss {}\n".format
    run = nanogpt(0) + nanogpt(10) + evaluation(10, 4.5)
    log = read(evaluation(0, 10.5) + run + evaluation(0, 9.5) + run.replace("3.5", "3.75"))
    assert evals_of(log) == [{0: 10.5, 10: 4.5}, {0: 9.5, 10: 4.5}]
    log = read(
        lines(nanogpt, 500, 520)
        + evaluation(520, 9.0)
        + evaluation(510, 8.0)
        + evaluation(500, 7.0)
        + lines(nanogpt, 510, 520, 3.25)
    )
    assert evals_of(log) == [{500: 7.0, 510: 8.0}]


def test_an_evaluation_without_a_step_belongs_to_the_line_above_it(read):
    evaluation = "val loss {}\n".format
    run = lines(llmc, 1, 3) + evaluation(3.5) + evaluation(11.25)
    assert evals_of(read(evaluation(11.5) + run + run)) == [{0: 11.5, 3: 3.5}, {3: 3.5}]
    text = llmc(20) + llmc(30) + evaluation(9.5) + llmc(40)
    text += llmc(30, 100, "3.0") + evaluation(7.5) + llmc(40)
    assert evals_of(read(text)) == [{30: 7.5}]  # 30 was taken again
    for steps, expected in (((0, 1), 0), ((10, 20), 0), ((51, 52), 50), ((7,), 6)):
        assert evals_of(read(evaluation(11.5) + "".join(map(llmc, steps)))) == [{expected: 11.5}]


def test_hugging_face_prints_no_step_but_its_bar_does(read):
    def bar(step, total=30):
        return f"\r {100 * step // total:3d}%|###       | {step}/{total} [00:10<00:35,  1.00s/it]"

    text = bar(7, 7) + "{'eval_loss': 9.5, 'epoch': 0}\n" + bar(0)
    for step, loss in ((10, 2.5), (20, "nan"), (30, 1.5)):
        values = f"{{'loss': {loss}, 'learning_rate': 4e-05, 'epoch': {step / 10}}}"
        text += bar(3, 7) + bar(step - 1) + f"\r                \r{values}\n" + bar(step)
    text += "\r{'eval_loss': 1.75, 'eval_runtime': 2.5, 'epoch': 3.0}\n"
    (run,) = read(text + "{'train_runtime': 9.5, 'train_loss': 2.0, 'epoch': 3.0}\n").runs
    assert run.columns["step"].tolist() == [10, 20, 30]
    assert run.is_not_finite("loss").tolist() == [False, True, False]
    assert run.state == "complete at step 30"
    assert run.evals[-1].items() >= {"step": 30, "val_loss": 1.75, "eval_s": 2.5}.items()


@pytest.mark.parametrize(
    ("clock", "started"),
    [
        ("2026-01-02T03:04:05.5Z ", 1767323045.5),
        ("2026-01-02 03:04:05,500 ", 1767323045.5),
        ("01/02/2026 03:04:05 ", 1767323045.0),
        ("Fri Jan  2 03:04:05 2026\n", 1767323045.0),
        ("2026-02-31 03:04:05 ", None),
    ],
)
def test_a_run_starts_at_its_first_clock_or_the_last_one_before(read, clock, started):
    (run,) = read("2025-01-01 00:00:00 hello\n" * (started is not None) + clock + nanogpt(1)).runs
    assert (run.started == started) == (started is not None)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[pod/run-0-x7k2p/trainer] 2026-01-02T03:04:05.678901234Z ", "\n"),
        ("[default0]:[rank0]:", "\n"),
        ("2026-01-02 03:04:05,678 - train - INFO - ", "\n"),
        ("0: ", "\r\n"),
        ("\x1b[32m\x1b[1m", "\x1b[0m\n"),
        ("[32m[1mINFO[0m - ", "\n"),
        (" 22%|##8       | 10/45 [00:10<00:35,  1.00s/it]\r", "\n"),
        (" 22%|##8       | 10/45 [00:10<00:35,  1.00s/it]", "\n"),
    ],
)
def test_a_wrapper_changes_no_number(read, before, after):
    text = lines(llmc, 500, 510) + lines(llmc, 505, 512)
    (plain,) = read(text).runs
    (run,) = read("".join(f"{before}{line}{after}" for line in text.splitlines())).runs
    assert run.remarks == plain.remarks
    for name in plain.columns.keys() - {"time"}:
        assert_array_equal(run.columns[name], plain.columns[name])


def test_odd_files(tmp_path):
    text = "Überschrift ☃\n" + lines(nanogpt, 1, 5000)
    packed = gzip.compress(text.encode())
    for content, count in (
        (text.encode("utf-16"), 5000),
        (b"\xfe\xff" + text.encode("utf-16-be"), 5000),
        (packed, 5000),
        (b"\xe2\x96\n" + text.encode(), 5000),
        (packed[: len(packed) // 2], None),
        (b"iter 1: " * 99 + b"A" * 3_000_000 + b"\n" + text.encode(), 5000),
    ):
        path = tmp_path / "x.log"
        path.write_bytes(content)
        log = read_log(path)
        (steps,) = steps_of(log)
        assert steps == list(range(1, len(steps) + 1)) and len(steps) > 100
        assert len(steps) == count or "the packed file ends early" in log.notes[0]
