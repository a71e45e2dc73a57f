"""Each dialect on the line that its trainer's source prints: its format string, given known numbers.

The format strings are those of the sources that the dialects name; a number is expected as the format rounds it.
"""

import re
from collections.abc import Callable

import pytest

from analysis.logs.dialect import DialectError, declared, read_dialects
from analysis.logs.log_runs import Log
from analysis.logs.shape import SILENT

Read = Callable[[str | bytes], Log]

# dialect, two lines made by the trainer's format, and what the second must give
total, loss, norm, lrm, dt, tps, mfu, minutes, lr = (
    12800,
    9.1234561,
    0.146649,
    0.75,
    1.2173,
    430600,
    43.8,
    3.414,
    6e-4,
)
nanochat = {
    "step": 100,
    "last_step": 12800,
    "loss": 9.123456,
    "lrm": 0.75,
    "step_ms": 1217.3,
    "tokens_per_s": 430600,
    "minutes": 3.41,
    "mfu": 43.8,
}
NANOCHAT_HEAD = "step {s:05d}/{n:05d} ({p:.2f}%) | loss: {l:.6f}".format
LINES: dict[str, tuple[str, Callable[[int], str], dict[str, float]]] = {
    "nanochat 2025-10-13": (
        "nanochat",
        lambda s: (
            f"{NANOCHAT_HEAD(s=s, n=total, p=100 * s / total, l=loss)} | lrm: {lrm:.2f} | dt: {dt * 1000:.2f}ms | "
            f"tok/sec: {tps:,} | mfu: {mfu:.2f} | total time: {minutes:.2f}m"
        ),
        nanochat,
    ),
    "nanochat 2025-11-05": (
        "nanochat",
        lambda s: (
            f"{NANOCHAT_HEAD(s=s, n=total, p=100 * s / total, l=loss)} | grad norm: {norm:.4f} | lrm: {lrm:.2f} | "
            f"dt: {dt * 1000:.2f}ms | tok/sec: {tps:,} | mfu: {mfu:.2f} | total time: {minutes:.2f}m"
        ),
        nanochat | {"grad_norm": 0.1466},
    ),
    "nanochat 2026-01-05": (
        "nanochat",
        lambda s: (
            f"{NANOCHAT_HEAD(s=s, n=total, p=100 * s / total, l=loss)} | grad norm: {norm:.4f} | lrm: {lrm:.2f} | "
            f"dt: {dt * 1000:.2f}ms | tok/sec: {tps:,} | mfu: {mfu:.2f} | total time: {minutes:.2f}m | eta: {259.1:.1f}m"
        ),
        nanochat | {"grad_norm": 0.1466},
    ),
    "nanochat 2026-02-10": (
        "nanochat",
        lambda s: (
            f"{NANOCHAT_HEAD(s=s, n=total, p=100 * s / total, l=loss)} | lrm: {lrm:.2f} | dt: {dt * 1000:.2f}ms | "
            f"tok/sec: {tps:,} | bf16_mfu: {mfu:.2f} | epoch: 1 pq: 3 rg: 17 | total time: {minutes:.2f}m | eta: 259.1m"
        ),
        nanochat | {"epoch": 1},
    ),
    "nanochat, a fork's own field": (
        "nanochat",
        lambda s: (
            f"{NANOCHAT_HEAD(s=s, n=total, p=100 * s / total, l=loss)} | lrm: {lrm:.2f} | dt: {dt * 1000:.2f}ms | "
            f"loader: {5.5:.1f}ms ({0.4:.1f}%) | tok/sec: {tps:,} | mfu: {mfu:.2f} | total time: {minutes:.2f}m"
        ),
        nanochat,
    ),
    "nanochat fine-tuning": (
        "nanochat_sft",
        lambda s: (
            f"step {s:05d} ({1.2:.2f}%) | loss: {loss:.6f} | lrm: {lrm:.2f} | dt: {dt * 1000:.2f}ms | tok/sec: {tps:,} | "
            f"mfu: {mfu:.2f} | epoch: 1 | total time: {minutes:.2f}m"
        ),
        {key: value for key, value in nanochat.items() if key != "last_step"} | {"epoch": 1},
    ),
    "nanoGPT": (
        "nanogpt",
        lambda s: f"iter {s}: loss {loss:.4f}, time {dt * 1000:.2f}ms, mfu {mfu:.2f}%",
        {"step": 100, "loss": 9.1235, "step_ms": 1217.3, "mfu": 43.8},
    ),
    "build-nanogpt": (
        "build_nanogpt",
        lambda s: (
            f"step {s:5d} | loss: {loss:.6f} | lr {lr:.4e} | norm: {norm:.4f} | dt: {dt * 1000:.2f}ms | "
            f"tok/sec: {tps:.2f}"
        ),
        {
            "step": 100,
            "loss": 9.123456,
            "lr": 6e-4,
            "grad_norm": 0.1466,
            "step_ms": 1217.3,
            "tokens_per_s": 430600,
        },
    ),
    "modded-nanogpt": (
        "modded_nanogpt",
        lambda s: f"step:{s}/{1750} train_time:{12345.4:.0f}ms step_avg:{123.454:.2f}ms",
        {"step": 100, "last_step": 1750, "minutes": 12345 / 60000, "step_avg_ms": 123.45},
    ),
    "llm.c": (
        "llmc",
        lambda s: (
            "step {:4d}/{} | loss {:7.6f} ({:+.2f}z)| norm {:6.4f} ({:+.2f}z)| lr {:.2e} | {:.2f} ms | {:.1f}% bf16 MFU | "
            "{:.0f} tok/s".format(
                s, 18865, loss, 1.234, norm, float("nan"), lr, dt * 1000, mfu, tps
            )
        ),
        {
            "step": 100,
            "last_step": 18865,
            "loss": 9.123456,
            "grad_norm": 0.1466,
            "lr": 6e-4,
            "step_ms": 1217.3,
            "mfu": 43.8,
            "tokens_per_s": 430600,
        },
    ),
    "llm.c main.log": (
        "llmc_main_log",
        lambda s: f"s:{s} trl:{loss:.4f} lr:{lr:.6f} norm:{norm:.2f}",
        {"step": 100, "loss": 9.1235, "lr": 6e-4, "grad_norm": 0.15},
    ),
    "torchtitan": (
        "torchtitan",
        lambda s: (
            f"step: {s:2}  loss: {loss:7.4f}  grad_norm: {norm:7.4f}  memory: {15.214:5.2f}GiB({19.2:.2f}%)  "
            f"tps: {round(7890.4):,}  tflops: {456.784:,.2f}  mfu: {46.19:.2f}%"
        ),
        {
            "step": 100,
            "loss": 9.1235,
            "grad_norm": 0.1466,
            "mem_gib": 15.21,
            "tokens_per_s_gpu": 7890,
            "tflops_gpu": 456.78,
            "mfu": 46.19,
        },
    ),
    "lingua": (
        "lingua",
        lambda s: (
            f"step: {s}  acc: 0  loss: {round(loss, 4):>7}  grad: {norm:.2e}  flops: {3.45e14:.2e}  wps: {2.34e4:.2e}  "
            f"iter: {round(1.23449, 4):>7}  data: {0.001:>5}  lr: {lr:.2e}  mem: 45%  pow: {612.3} W"
        ),
        {
            "step": 100,
            "loss": 9.1235,
            "grad_norm": 0.147,
            "tokens_per_s_gpu": 23400,
            "step_ms": 1234.5,
            "data_wait_s": 0.001,
            "lr": 6e-4,
            "power_w": 612.3,
        },
    ),
    "nanotron": (
        "nanotron",
        lambda s: (
            f"iteration: {s} / 1000 | consumed_tokens: 5.24M | elapsed_time_per_iteration_ms: 4.71K | "
            "tokens_per_sec: 1.27M | tokens_per_sec_per_gpu: 159K | global_batch_size: 1.02K | lm_loss: 9.12 | lr: 3e-05 | "
            "model_tflops_per_gpu: 123 | hardware_tflops_per_gpu: 123 | grad_norm: 1.23"
        ),
        {
            "step": 100,
            "last_step": 1000,
            "tokens": 5.24e6,
            "step_ms": 4710,
            "tokens_per_s": 1.27e6,
            "tokens_per_s_gpu": 159e3,
            "loss": 9.12,
            "lr": 3e-5,
            "tflops_gpu": 123,
            "grad_norm": 1.23,
        },
    ),
    "Megatron-LM": (
        "megatron",
        lambda s: (
            f" [2026-01-02 03:04:05.678901] iteration {s:8d}/{500:8d} | consumed samples: {25600:12d} | "
            f"elapsed time per iteration (ms): {dt * 1000:.1f} | throughput per GPU (TFLOP/s/GPU): {123.4:.1f} | "
            f"learning rate: {lr:.6E} | global batch size: {256:5d} | lm loss: {loss:.6E} | loss scale: {1.0:.1f} | "
            f"grad norm: {norm:.3f} | num zeros: {0} | number of skipped iterations: {0:3d} | "
            f"number of nan iterations: {0:3d} |"
        ),
        {
            "step": 100,
            "last_step": 500,
            "samples": 25600,
            "step_ms": 1217.3,
            "tflops_gpu": 123.4,
            "lr": 6e-4,
            "loss": 9.123456,
            "grad_norm": 0.147,
            "skipped_iterations": 0,
            "nan_iterations": 0,
            "time": 1767323045.678901,
        },
    ),
    "litgpt": (
        "litgpt",
        lambda s: (
            f"Epoch {1} | iter {s} step {30} | loss train: {loss:.3f}, val: n/a | iter time: {dt * 1000:.2f} ms (step) "
            "remaining time: 1:23:45"
        ),
        {
            "step": 100,
            "epoch": 1,
            "optimizer_step": 30,
            "loss": 9.123,
            "step_ms": 1217.3,
            "val_loss": SILENT,
        },
    ),
    "picotron": (
        "picotron",
        lambda s: (
            f"[rank 0] Step: {s:<5d} | Loss: {loss:6.4f} | Global batch size: 1.05M | Tokens/s: 234.5K | "
            "Tokens/s/GPU: 29.3K | Tokens: 12.6M/10B | MFU: 49.12% | Memory usage: 55.12GB"
        ),
        {
            "step": 100,
            "loss": 9.1235,
            "batch_tokens": 1.05e6,
            "tokens_per_s": 234500,
            "tokens_per_s_gpu": 29300,
            "tokens": 12.6e6,
            "mfu": 49.12,
            "mem_gb": 55.12,
        },
    ),
    "MaxText": (
        "maxtext",
        lambda s: (
            f"completed step: {s}, seconds: {11.715:.3f}, TFLOP/s/device: {193.354:.3f}, Tokens/s/device: {4195.595:.3f}, "
            f"total_weights: {1572864}, loss: {9.774:.3f}"
        ),
        {
            "step": 100,
            "step_ms": 11715,
            "tflops_gpu": 193.354,
            "tokens_per_s_gpu": 4195.595,
            "loss": 9.774,
        },
    ),
    "this repository": (
        "pure_transformer",
        lambda s: (
            f"step={s}/18865 loss=9.1235 lr=6.000e-04 grad_norm=0.147 step_ms=1217.3 tokens_per_s=430600 mfu=n/a "
            "mem_gib=61.20 tokens=52428800"
        ),
        {
            "step": 100,
            "last_step": 18865,
            "loss": 9.1235,
            "lr": 6e-4,
            "grad_norm": 0.147,
            "step_ms": 1217.3,
            "tokens_per_s": 430600,
            "mfu": SILENT,
            "mem_gib": 61.2,
            "tokens": 52428800,
        },
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_of_the_source_gives_the_numbers_it_was_made_of(name: str, read: Read) -> None:
    """Three lines: the slow way, the quick one, and a number that is wider than it was."""
    dialect, line, expected = LINES[name]
    log = read("".join(line(s) + "\n" for s in (98, 99, 100)))
    (run,) = log.runs
    assert (run.dialect.name, log.not_understood) == (dialect, 0)
    assert run.columns["step"].tolist() == [98, 99, 100]
    found = {
        key: run.columns[key][-1] if key in run.columns else SILENT
        for key in expected | run.columns
    }
    assert found == expected


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_was_cut_short_is_no_step_unless_nothing_is_missing_that_has_a_unit(
    name: str, read: Read
) -> None:
    """Wherever a line is cut, what is taken of it is what the whole line has; or else the line is not taken."""
    _, line, expected = LINES[name]
    whole = line(100)
    last = whole.rstrip(" |")
    for end in range(1, len(last), 2):
        for run in read(whole[:end] + "\n").runs:
            differ = {
                key
                for key, column in run.columns.items()
                if column[0] not in (expected.get(key), SILENT)
            }
            number = re.search(r"[-+0-9.,eE]*$", whole[:end])
            assert not differ or (number and number[0]), whole[:end]
            assert len(differ) <= 1, whole[:end]


def test_dialects_do_not_take_each_others_lines() -> None:
    lines = {name: (dialect, line(100).encode()) for name, (dialect, line, _) in LINES.items()}
    dialects = read_dialects()
    for dialect, line in lines.values():
        assert [d.name for d in dialects if (d.head or d.evals) and d.read(line)] == [dialect]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('source = "x"\nhead = "iter {stepp}:"', "must hold {step}"),
        ('source = "x"\nhead = "iter {step}:"\nfeilds = []', "feilds is no key; there are source"),
        ('head = "iter {step}:"', "'source' is missing"),
        ('source = "x"\nhead = "iter {step"', "is no part of a template"),
        ("source = ", "declares no dialect"),
        *(
            (f'source = "x"\nhead = "iter {{step}}"\n{line}\n', words)
            for line, words in (
                ('fields = ["{minutes*60}"]', "{minutes*60} is no unit"),
                ('fields = ["{minutes/0}"]', "{minutes/0} is no unit"),
                ('ends = "done"', "ends must be a list"),
                ('fields = "loss {loss}"', "fields must be a list"),
                ('zero_based = "no"', "zero_based = true"),
                ('keys = "a"', "keys must be a table"),
                ("unknown = { mfu = 0.0 }", "unknown = { mfu = [0.0] }"),
                ('fields = ["{time} s"]', "time is taken"),
                ('evals = ["val {row}"]', "row is taken"),
                ('fields = ["loss {loss}", "mean {loss}"]', "loss is there twice"),
            )
        ),
    ],
)
def test_a_declaration_that_cannot_be_used_is_refused_with_the_reason(
    tmp_path, text: str, words: str
) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(DialectError) as error:
        declared(tmp_path / "mine.toml")
    assert words in str(error.value) and "mine.toml" in str(error.value)


def test_a_trainer_is_added_by_a_file(tmp_path, read: Read) -> None:
    """The example of docs/logs.md."""
    (tmp_path / "mine.toml").write_text(
        'source = "my trainer"\nhead = "[[{step}]]"\nseparators = ";"\n'
        'fields = ["loss {loss}", "{step_ms*1000} s"]\noptional = ["gnorm {grad_norm}"]\n'
    )
    dialect = declared(tmp_path / "mine.toml")
    line = b"[12] loss 3.25; gnorm 0.5; speed: fast; 1.5 s"
    found = dialect.read(line)
    assert found is not None
    assert [(n.column, line[n.start : n.end]) for n in found.numbers] == [
        ("step", b"12"),
        ("loss", b"3.25"),
        ("grad_norm", b"0.5"),
        ("step_ms", b"1.5"),
    ]
    assert dialect.read(b"[12] loss 3.25; gnorm 0.5; 1.5") is None


@pytest.mark.parametrize("name", LINES)
def test_a_line_that_was_torn_changes_no_other(name: str, read: Read) -> None:
    """A line that another process wrote into, at every third place: the rest of a line stands behind a part of it."""
    _, line, expected = LINES[name]
    torn = line(15)
    for end in range(1, len(torn), 3):
        for begin in (0, max(0, end - 9)):
            lines = (
                [line(step) for step in range(10, 15)]
                + [torn[:end] + torn[begin:]]
                + [line(step) for step in range(16, 101)]
            )
            columns = {}
            for run in read("".join(text + "\n" for text in lines)).runs:
                for key, column in run.columns.items():
                    columns.setdefault(key, []).extend(column.tolist())
            steps = columns["step"]
            assert {*range(10, 15), *range(16, 101)} <= {*steps}
            assert steps[-1] == 100 and columns["loss" if "loss" in expected else "minutes"][
                -1
            ] == expected.get("loss", expected.get("minutes"))


@pytest.mark.parametrize(
    ("loss", "known"),
    [
        ("9.1", True),
        ("nan", True),
        ("-inf", True),
        ("6.006.000e-04", False),
        ("1,2.3.4", False),
        ("infK", False),
        ("1.5e-05K", False),
        ("n/aK", False),
        ("1.5K", False),
        (".", False),
        (",5", False),
    ],
)
def test_what_is_no_number_is_not_understood_and_stops_nothing(
    read: Read, loss: str, known: bool
) -> None:
    """In a column of wide numbers, in one of short numbers, and in one that was nan before."""
    for before in ("0.12345678901234567", "9.1234", "nan"):
        line = "iter {}: loss {}, time 251.30ms, mfu 31.20%\n"
        log = read(
            "".join(line.format(step, loss if step == 50 else before) for step in range(100))
        )
        (run,) = log.runs
        assert (50 in run.columns["step"], len(run.columns["step"])) == (known, 99 + known)
        assert log.not_understood == (not known and loss not in ("n/aK", "."))
    short = LINES["picotron"][1]
    log = read(
        "".join(
            short(step).replace("Tokens/s: 234.5K", f"Tokens/s: {loss if step == 50 else '234.5K'}")
            + "\n"
            for step in range(100)
        )
    )
    (run,) = log.runs
    assert (50 in run.columns["step"]) == (known or loss == "1.5K") and len(
        run.columns["step"]
    ) >= 99


def test_a_line_whose_step_is_no_number_is_no_step(read: Read) -> None:
    line = "iter {}: loss 3.5, time 251.30ms, mfu 31.20%\n"
    for odd in ("nan", "inf", "n/a", "1e999"):
        (run,) = read("".join(line.format(step) for step in range(9)) + line.format(odd)).runs
        assert run.columns["step"].tolist() == list(range(9))
