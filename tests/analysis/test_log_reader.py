"""What a log must not be made to say: cut lines, source code, quotations, NaN, several processes, several runs."""

import gzip
import math
import time
from collections.abc import Callable

import pytest

from analysis.logs.log_file import Blocks
from analysis.logs.log_runs import Log, read_log, state
from tests.analysis.conftest import DIALECTS, column

Read = Callable[[str | bytes], Log]


def nanogpt(step: int, loss: object = 3.5) -> str:
    return f"iter {step}: loss {loss if isinstance(loss, str) else format(loss, '.4f')}, time 251.30ms, mfu 31.20%\n"


def llmc(step: int, total: int = 100, loss: str = "3.500000") -> str:
    return (
        f"step {step:4d}/{total} | loss {loss} (+nanz)| norm 1.2345 (+nanz)| lr 6.00e-04 | 351.20 ms | "
        "52.1% bf16 MFU | 1492000 tok/s\n"
    )


def steps_of(log: Log) -> list[list[float]]:
    return [column(run, "step") for run in log.runs]


def test_a_last_line_without_a_line_end_is_left_out_and_said(read: Read) -> None:
    log = read(nanogpt(1) + nanogpt(2) + nanogpt(3)[:-12])  # "time 251.30ms" is whole, mfu is gone
    assert steps_of(log) == [[1, 2]]
    assert any("no line end" in note and "iter 3" in note for note in log.notes)
    whole = read(nanogpt(1) + nanogpt(2) + nanogpt(3).rstrip())
    assert steps_of(whole) == [[1, 2]] and any("iter 3" in note for note in whole.notes)


def test_minutes_need_their_m_and_are_not_millions(read: Read) -> None:
    line = (
        "step 00010/12800 (0.08%) | loss: 9.1 | lrm: 1.00 | dt: 32{} | tok/sec: 430,600 | mfu: 43.80 | "
        "total time: 3.41{}\n"
    )
    assert column(read(line.format("ms", "m")).runs[0], "minutes") == [3.41]
    for dt, minutes in (("", "m"), ("ms", ""), ("ms", "M"), ("s", "m")):
        log = read(line.format(dt, minutes))
        assert (log.runs, log.not_understood) == ([], 1)


def test_source_code_and_quotations_are_no_data(read: Read) -> None:
    log = read(
        'print0(f"step:{step}/{args.num_iterations} train_time:{t:.0f}ms step_avg:{t / step:.2f}ms")\n'
        'logger.info("step:12/100 train_time:50ms step_avg:5.00ms")\n'
        "# step:13/100 train_time:50ms step_avg:5.00ms\n"
        "x = 'iter 5: loss 3.4567, time 251.30ms, mfu 31.20%'\n"
    )
    assert log.runs == []


def test_nan_and_inf_stay_and_silence_is_neither(read: Read) -> None:
    (run,) = read(
        llmc(1) + llmc(2, loss="nan") + llmc(3, loss="inf") + llmc(4, loss="-nan") + llmc(5)
    ).runs
    assert column(run, "step") == [1, 2, 3, 4, 5]
    loss = column(run, "loss")
    assert (
        loss[0] == 3.5
        and math.isnan(loss[1])
        and loss[2] == math.inf
        and math.isnan(loss[3])
        and loss[4] == 3.5
    )


def test_lines_that_look_like_steps_are_counted_and_the_first_shown(read: Read) -> None:
    log = read(
        nanogpt(1) + "".join(f"step {i} of my own | training loss = 3.{i}\n" for i in range(5))
    )
    assert log.not_understood == 5 and steps_of(log) == [[1]]
    assert [note for note in log.notes if "not understood" in note] == [
        f"not understood: step {i} of my own | training loss = 3.{i}" for i in range(3)
    ]


@pytest.mark.parametrize(
    ("first", "then", "runs", "lost"),
    [
        ((0, 10), (0, 5), [(0, 10), (0, 5)], []),  # begins anew
        ((1, 10), (1, 5), [(1, 10), (1, 5)], []),
        ((500, 510), (505, 512), [(500, 512)], [6]),  # taken up again at 505: 505 to 510 are lost
        ((500, 510), (500, 512), [(500, 512)], [11]),  # nothing was saved since
        ((500, 510), (511, 512), [(500, 512)], []),  # goes on
    ],
)
def test_a_restart_is_told_from_a_new_run(
    read: Read,
    first: tuple[int, int],
    then: tuple[int, int],
    runs: list[tuple[int, int]],
    lost: list[int],
) -> None:
    text = "".join(llmc(s, 1000, "9.000000") for s in range(first[0], first[1] + 1))
    text += "Traceback: killed\n" + "".join(
        llmc(s, 1000, "3.000000") for s in range(then[0], then[1] + 1)
    )
    log = read(text)
    assert steps_of(log) == [list(range(a, b + 1)) for a, b in runs]
    assert [back.rows for run in log.runs for back in run.backs] == lost
    again = log.runs[-1]
    assert [
        loss
        for s, loss in zip(column(again, "step"), column(again, "loss"), strict=True)
        if s >= then[0]
    ] == [3.0] * (then[1] - then[0] + 1)


def test_another_count_of_steps_or_another_trainer_is_another_run(read: Read) -> None:
    log = read(llmc(50, 100) + llmc(51, 100) + llmc(51, 200) + nanogpt(60) + nanogpt(70))
    assert steps_of(log) == [[50, 51], [51], [60, 70]]
    assert steps_of(read(llmc(50) + llmc(51) + nanogpt(52) + nanogpt(53))) == [[50, 51], [52, 53]]
    assert steps_of(read(llmc(99, 100) + llmc(100, 100) + llmc(101, 200))) == [
        [99, 100, 101]
    ]  # extended


def test_an_error_behind_the_end_of_a_run_is_not_that_runs(read: Read) -> None:
    line = "step {:05d}/00003 (0.08%) | loss: 3.000000 | dt: 50.00ms | tok/sec: 1,000 | total time: 1.00m\n".format
    run = "".join(map(line, range(3)))
    end, first, second = "Total training time: 2.39m\n", "ValueError: first\n", "KeyError: second\n"
    for text, expected in (
        (run + end, ("", "")),
        (run + first, ("ValueError: first", "")),
        (run + end + first, ("", "ValueError: first")),
        (run + first + end + second, ("ValueError: first", "KeyError: second")),
        (run + end + first + second, ("", "KeyError: second")),
    ):
        log = read(text + run + end)
        assert [(r.ended, r.error, r.outside) for r in log.runs] == [
            (end in text, *expected),
            (True, "", ""),
        ]


def test_logging_every_so_many_steps_begins_at_the_first_of_these(read: Read) -> None:
    log = read("".join(nanogpt(s) for s in (10, 20, 30, 10, 20, 20, 30)))
    assert steps_of(log) == [[10, 20, 30], [10, 20, 30]]


def test_of_several_ranks_the_lowest_counts_and_pods_are_runs_of_their_own(read: Read) -> None:
    ranks = "".join(
        f"[rank{r}]: {llmc(s, loss=f'{r + 1}.500000')}" for s in range(1, 6) for r in (3, 0, 1)
    )
    log = read(ranks)
    assert steps_of(log) == [[1, 2, 3, 4, 5]] and column(log.runs[0], "loss") == [1.5] * 5
    assert any("10 lines of 2 other ranks" in note for note in log.notes)
    pods = "".join(f"[pod/{p}/trainer] {llmc(s)}" for s in range(1, 4) for p in ("a-0", "b-0"))
    assert steps_of(read(pods)) == [[1, 2, 3], [1, 2, 3]]


def test_evaluations_belong_to_their_run_and_what_a_restart_undid_is_gone(read: Read) -> None:
    evaluation = "step {}: train loss 3.1, val loss {}\n"
    log = read(
        evaluation.format(0, 10.5)
        + nanogpt(0, 10.75)
        + nanogpt(10)
        + evaluation.format(10, 4.5)
        + evaluation.format(0, 9.5)
        + nanogpt(0)
        + nanogpt(10)
        + evaluation.format(10, 3.5)
    )
    assert [run.evals["val_loss"].tolist() for run in log.runs] == [[10.5, 4.5], [9.5, 3.5]]
    lines = [nanogpt(s) for s in (500, 510, 520)]
    undone = read(
        "".join(lines)
        + evaluation.format(520, 9.0)
        + lines[1]
        + lines[2]
        + evaluation.format(520, 8.0)
    )
    assert [run.evals["val_loss"].tolist() for run in undone.runs] == [[8.0]]


@pytest.mark.parametrize("reached", [100, 60])
@pytest.mark.parametrize("twice", [1, 2])
@pytest.mark.parametrize("begins_with_one", [True, False])
def test_evaluations_without_a_step_go_to_the_run_that_made_them(
    read: Read, reached: int, twice: int, begins_with_one: bool
) -> None:
    """llm.c evaluates before its first step, every so many steps, and after its last one."""
    text, expected = "", []
    for run, last in enumerate((reached, 100)):
        expected.append({step: 10 + run - step / 25 for step in range(0, last + 1, 25)})
        for step in range(last + 1):
            text += llmc(step) if step else ""
            text += f"val loss {expected[run][step]:.6f}\n" * twice if step in expected[run] else ""
    if not begins_with_one:  # the log was cut off at its start
        text = text.removeprefix("val loss 10.000000\n" * twice)
        del expected[0][0]
    log = read(text)
    assert [
        dict(zip(run.evals["step"].tolist(), run.evals["val_loss"].tolist(), strict=True))
        for run in log.runs
    ] == expected


def test_an_evaluation_before_the_first_line_has_the_step_before_it_or_is_left_out(
    read: Read,
) -> None:
    """Trainers that number from 0, log every tenth step, or were resumed; and one that numbers no steps."""
    for steps, expected in (
        ((0, 1, 2), 0),
        ((0, 10, 20), 0),
        ((10, 20, 30), 0),
        ((1, 11, 21), 0),
        ((51, 52), 50),
        ((7,), 6),
    ):
        (run,) = read("val loss 11.5\n" + "".join(llmc(step) for step in steps)).runs
        assert (run.evals["step"].tolist(), run.evals["val_loss"].tolist()) == ([expected], [11.5])
    (run,) = read(
        "{'eval_loss': 3.5, 'epoch': 0.1}\n"
        + "".join(f"{{'loss': 2.5, 'epoch': {epoch}}}\n" for epoch in (0.5, 1.0))
        + "{'eval_loss': 3.25, 'epoch': 1.0}\n"
    ).runs
    assert not len(run.evals.get("val_loss", ()))


def test_hugging_face_prints_no_step_but_its_bar_does(read: Read) -> None:
    def bar(step: int) -> str:
        return f"\r {10 * step // 3:3d}%|###       | {step}/30 [00:10<00:35,  1.00s/it]"

    text = bar(0)
    for step, loss in ((10, 2.5), (20, float("nan")), (30, 1.5)):
        said = {"loss": loss, "grad_norm": 1.5, "learning_rate": 4e-05, "epoch": step / 10}
        text += bar(step - 1) + f"\r                \r{said}\n" + bar(step)
    text += "\r{'eval_loss': 1.75, 'eval_runtime': 2.5, 'epoch': 3.0}\n"
    text += "{'train_runtime': 9.5, 'train_loss': 2.0, 'epoch': 3.0}\n"
    (run,) = read(text).runs
    assert column(run, "step") == [10, 20, 30] and column(run, "lr") == [4e-05] * 3
    assert column(run, "loss")[0] == 2.5 and math.isnan(column(run, "loss")[1])
    assert run.evals["val_loss"].tolist() == [1.75] and run.complete
    (alone,) = read("{'loss': 2.5, 'epoch': 0.5}\n{'loss': 2.25, 'epoch': 1.0}\n").runs
    assert (
        alone.reached is None
        and column(alone, "epoch") == [0.5, 1.0]
        and "numbers no steps" in state(alone)
    )


@pytest.mark.parametrize("before", ["", "[pod/run-0-x/trainer] 2026-01-02T03:04:05.123456789Z "])
@pytest.mark.parametrize("on_lines", [True, False])
@pytest.mark.parametrize("names_its_end", [True, False])
def test_each_training_of_hugging_face_has_the_bar_in_front_of_it(
    read: Read, before: str, on_lines: bool, names_its_end: bool
) -> None:
    """An evaluation first, one in the midst of it, and then a training of another length."""

    def bars(first: int, last: int, total: int) -> str:
        drawn = [
            f"{100 * s // total:3d}%|##  | {s}/{total} [00:10<00:35,  1.00s/it]"
            for s in range(first, last + 1)
        ]
        return (
            "".join(f"{before}{text}\n" for text in drawn)
            if on_lines
            else before + "\r" + "\r".join(drawn) + "\r\n"
        )

    text = bars(0, 7, 7) + f"{before}{{'eval_loss': 9.5, 'epoch': 0}}\n"
    for total, every in ((30, 10), (100, 20)):
        for step in range(every, total + 1, every):
            text += (
                bars(step - every, step - 1, total)
                + f"{before}{{'loss': {step / 8}, 'epoch': {step / total}}}\n"
            )
            text += bars(step, step, total)
            text += (
                bars(0, 7, 7) + f"{before}{{'eval_loss': {step / 16}, 'epoch': {step / total}}}\n"
            )
            text += bars(step, step, total)
        text += (
            f"{before}{{'train_runtime': 9.5, 'train_loss': 2.0, 'epoch': 1.0}}\n"
            if names_its_end
            else ""
        )
    log = read(text)
    assert steps_of(log) == [[10, 20, 30], [20, 40, 60, 80, 100]]
    assert [run.last_step for run in log.runs] == [30, 100]
    for run in log.runs:
        assert column(run, "loss") == [s / 8 for s in column(run, "step")]
    assert [
        dict(zip(run.evals["step"].tolist(), run.evals["val_loss"].tolist(), strict=True))
        for run in log.runs
    ] == [{0: 9.5, 10: 0.625, 20: 1.25, 30: 1.875}, {s: s / 16 for s in range(20, 101, 20)}]


def test_blocks_are_whole_lines_wherever_a_read_ends(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = b"one\r\ntwo\rthree\n\x1b[32mfour\x1b[0m\r\n\nlast"
    path = tmp_path / "x.log"
    path.write_bytes(text)
    for size in range(1, len(text) + 1):
        monkeypatch.setattr("analysis.logs.log_file.BLOCK", size)
        blocks = Blocks(path)
        assert b"".join(blocks) == b"one\ntwo\nthree\nfour\n\n"
        assert blocks.cut == b"last"


def test_a_packed_file_that_ends_early_is_read_as_far_as_it_goes(tmp_path) -> None:
    path = tmp_path / "x.log.gz"
    path.write_bytes(
        gzip.compress("".join(nanogpt(s, s / 7) for s in range(5000)).encode())[:-3000]
    )
    log = read_log(path, DIALECTS)
    (steps,) = steps_of(log)
    assert 100 < len(steps) < 5000 and steps == list(range(len(steps)))
    assert any("ends early" in note for note in log.notes)


def test_numbers_of_any_form_are_those_that_float_reads(read: Read) -> None:
    """Also where their form changes in mid-log, so that the quick way meets what it was not made for."""
    texts = [
        "3.5",
        "3.25",
        "1e-05",
        "0.1234567890123456789",
        "12",
        "1234567890.123456789",
        "-0.5",
        "3.",
        "7.0E+02",
    ]
    (run,) = read("".join(nanogpt(s, texts[s % len(texts)]) for s in range(400))).runs
    assert column(run, "loss") == [float(texts[s % len(texts)]) for s in range(400)]


def test_lines_of_megabytes_take_no_longer_than_others(read: Read) -> None:
    """Patterns that look ahead take the square of a line's length, hours for these."""
    began = time.process_time()
    log = read(
        nanogpt(1)
        + "step 1 " * 400_000
        + "\n"
        + "A" * 3_000_000
        + "\n"
        + "[step=1/2" * 100_000
        + "\n"
        + nanogpt(2)
    )
    assert steps_of(log) == [[1, 2]] and time.process_time() - began < 60
