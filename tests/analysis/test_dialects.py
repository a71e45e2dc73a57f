"""Each dialect on the line that its trainer prints; and lines that were cut, torn or printed into."""

import re
import tomllib
from pathlib import Path

import pytest

from analysis.logs.dialect import Dialect, DialectError, read_dialects

BY_NAME = {dialect.name: dialect for dialect in read_dialects()}
NANOCHAT = {
    "loss": 9.123456,
    "lrm": 0.75,
    "step_ms": 1217.3,
    "tokens_per_s": 430600,
    "mfu": 43.8,
    "minutes": 3.41,
}
LLMC = {
    "loss": 9.123456,
    "grad_norm": 0.1466,
    "lr": 6e-4,
    "step_ms": 1217.3,
    "mfu": 43.8,
    "tokens_per_s": 430600,
}

# Dialect, a line of step 100, and its other numbers.
LINES = [
    (
        "nanochat",
        "step 00100/12800 (0.78%) | loss: 9.123456 | grad norm: 0.1466 | lrm: 0.75 | dt: 1217.30ms | tok/sec: 430,600 | "
        "bf16_mfu: 43.80 | epoch: 1 pq: 3 rg: 17 | own: 5.5ms (0.4%) | total time: 3.41m | eta: 259.1m",
        {"last_step": 12800, **NANOCHAT, "grad_norm": 0.1466, "epoch": 1},
    ),
    (
        "nanochat_sft",
        "step 00100 (1.20%) | loss: 9.123456 | lrm: 0.75 | dt: 1217.30ms | tok/sec: 430,600 | mfu: 43.80 | epoch: 1 | "
        "total time: 3.41m",
        {**NANOCHAT, "epoch": 1},
    ),
    (
        "nanochat_sft_epochs",
        "  step 00100/30026 | epoch 1/2 | loss: 1.7691 | avg: 1.5291 | lr: 8.33e-07",
        {"last_step": 30026, "epoch": 1, "loss": 1.7691, "loss_avg": 1.5291, "lr": 8.33e-07},
    ),
    (
        "nanochat_rl",
        "Step 100/466 | Average reward: 0.25 | Average sequence length: 120.00",
        {"last_step": 466, "reward": 0.25, "sequence_length": 120},
    ),
    (
        "nanogpt",
        "iter 100: loss 9.1235, time 1217.30ms, mfu 43.80%",
        {"loss": 9.1235, "step_ms": 1217.3, "mfu": 43.8},
    ),
    (
        "build_nanogpt",
        "step   100 | loss: 9.123456 | lr 6.0000e-04 | norm: 0.1466 | dt: 1217.30ms | tok/sec: 430600.00",
        {key: LLMC[key] for key in ("loss", "lr", "grad_norm", "step_ms", "tokens_per_s")},
    ),
    (
        "modded_nanogpt",
        "step:100/1750 train_time:12345ms step_avg:123.45ms",
        {"last_step": 1750, "minutes": 12345 / 60000, "step_avg_ms": 123.45},
    ),
    (
        "llmc",
        "step  100/18865 | loss 9.123456 (+1.23z)| norm 0.1466 (+nanz)| lr 6.00e-04 | 1217.30 ms | 43.8% bf16 MFU | "
        "430600 tok/s",
        {"last_step": 18865, **LLMC},
    ),
    (
        "llmc_main_log",
        "s:100 trl:9.1235 lr:0.000600 norm:0.15",
        {"loss": 9.1235, "lr": 6e-4, "grad_norm": 0.15},
    ),
    (
        "torchtitan",
        "step: 100  loss:  9.1235  grad_norm:  0.1466  memory: 15.21GiB(19.20%)  tps: 7,890  tflops: 456.78  mfu: 46.19%",
        {
            "loss": 9.1235,
            "grad_norm": 0.1466,
            "mem_gib": 15.21,
            "tokens_per_s_gpu": 7890,
            "tflops_gpu": 456.78,
            "mfu": 46.19,
        },
    ),
    (
        "lingua",
        "step: 100  acc: 0  loss:  9.1235  grad: 1.47e-01  flops: 3.45e+14  wps: 2.34e+04  iter:  1.2345  data: 0.001  "
        "lr: 6.00e-04  mem: 45%  pow: 612.3 W",
        {
            "loss": 9.1235,
            "grad_norm": 0.147,
            "tokens_per_s_gpu": 23400,
            "step_ms": 1234.5,
            "data_wait_s": 0.001,
            "lr": 6e-4,
            "power_w": 612.3,
        },
    ),
    (
        "nanotron",
        "iteration: 100 / 1000 | consumed_tokens: 5.24M | elapsed_time_per_iteration_ms: 4.71K | tokens_per_sec: 1.27M | "
        "tokens_per_sec_per_gpu: 159K | global_batch_size: 1.02K | lm_loss: 9.12 | lr: 3e-05 | grad_norm: 1.23",
        {
            "last_step": 1000,
            "tokens": 5.24e6,
            "step_ms": 4710,
            "tokens_per_s": 1.27e6,
            "tokens_per_s_gpu": 159e3,
            "loss": 9.12,
            "lr": 3e-5,
            "grad_norm": 1.23,
        },
    ),
    (
        "megatron",
        " iteration      100/     500 | consumed samples:        25600 | elapsed time per iteration (ms): 1217.3 | "
        "learning rate: 6.000000E-04 | global batch size:   256 | lm loss: 9.123456E+00 | grad norm: 0.147 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |",
        {
            "last_step": 500,
            "samples": 25600,
            "step_ms": 1217.3,
            "lr": 6e-4,
            "loss": 9.123456,
            "grad_norm": 0.147,
            "skipped_iterations": 0,
            "nan_iterations": 0,
        },
    ),
    (
        "litgpt",
        "Epoch 1 | iter 100 step 30 | loss train: 9.123, val: n/a | iter time: 1217.30 ms (step) remaining time: 1:23:45",
        {"epoch": 1, "optimizer_step": 30, "loss": 9.123, "val_loss": None, "step_ms": 1217.3},
    ),
    (
        "picotron",
        "Step: 100   | Loss: 9.1235 | Global batch size: 1.05M | Tokens/s: 234.5K | Tokens/s/GPU: 29.3K | "
        "Tokens: 12.6M/10B | MFU: 49.12% | Memory usage: 55.12GB",
        {
            "loss": 9.1235,
            "batch_tokens": 1.05e6,
            "tokens_per_s": 234500,
            "tokens_per_s_gpu": 29300,
            "tokens": 12.6e6,
            "mfu": 49.12,
            "mem_gb": 55.12,
        },
    ),
    (
        "maxtext",
        "completed step: 100, seconds: 11.715, TFLOP/s/device: 193.354, Tokens/s/device: 4195.595, total_weights: 1572864, "
        "loss: 9.774",
        {"step_ms": 11715, "tflops_gpu": 193.354, "tokens_per_s_gpu": 4195.595, "loss": 9.774},
    ),
    (
        "pure_transformer",
        "step=100/18865 loss=9.1235 lr=6.000e-04 grad_norm=0.147 step_ms=1217.3 tokens_per_s=430600 mfu=n/a mem_gib=61.20 "
        "tokens=52428800 left=0:12",
        {
            "last_step": 18865,
            "loss": 9.1235,
            "lr": 6e-4,
            "grad_norm": 0.147,
            "step_ms": 1217.3,
            "tokens_per_s": 430600,
            "mfu": None,
            "mem_gib": 61.2,
            "tokens": 52428800,
        },
    ),
    (
        "hugging_face",
        "{'loss': 2.3456, 'grad_norm': '1.23', 'learning_rate': 4e-05, 'epoch': 0.12, 'step': 100}",
        {"loss": 2.3456, "grad_norm": 1.23, "lr": 4e-5, "epoch": 0.12},
    ),
]
each_line = pytest.mark.parametrize(("name", "line", "others"), LINES)


@each_line
def test_a_line_gives_its_numbers_and_no_other_dialect_takes_it(name, line, others):
    (found,) = BY_NAME[name].read(line)
    assert found.values == {"step": 100, **others}
    assert [dialect.name for dialect in BY_NAME.values() if dialect.read(line)] == [name]


@each_line
def test_wherever_a_line_is_cut_no_number_is_another(name, line, others):
    """Only a number without a unit at the very end of a line cannot be told from a part of it."""
    for end in range(1, len(line)):
        for found in BY_NAME[name].read(line[:end]):
            differing = [
                key for key, value in found.values.items() if value != {"step": 100, **others}[key]
            ]
            assert not differing or re.search(r"[-+0-9.,eEna/]$", line[:end])
            assert len(differing) <= 1


@each_line
def test_another_process_printed_before_or_behind(name, line, others):
    """The whole line is read. Its last number is left out if nothing tells where it ends."""
    whole = {"step": 100, **others}
    dialect = BY_NAME[name]
    for other in ("Killing subprocess 12", "saved a=1 to 'x.pt'", "[12%] 7 of 9 files ", line[:40]):
        assert dialect.read(other + line)[-1].values == whole
        for found in dialect.read(other + line) + dialect.read(line + other):
            assert found.values.items() <= whole.items()
        missing = [whole.keys() - found.values.keys() for found in dialect.read(line + other)[:1]]
        assert not missing or len(missing[0]) <= 1


def test_a_part_of_a_number_is_never_read():
    """Another process wrote into the line."""
    line = "step 100 | loss: 9.12{} | norm: 0.5 | lr 6.0e-04"
    for torn in ("Killing 12", "6.000", "e", ",5", "9.12", "nan", " 45%|## "):
        (found, *_) = [*BY_NAME["build_nanogpt"].read(line.format(torn)), None]
        assert found is None
    for form in (
        "3.5",
        "1e-05",
        "0.1234567890123456789",
        "12",
        "1,234,567.5",
        "-0.5",
        "3.",
        "7.0E+02",
        "-inf",
    ):
        (found,) = BY_NAME["build_nanogpt"].read(f"step 100 | loss: {form} | norm: 0.5")
        assert found.values["loss"] == float(form.replace(",", ""))
    (mixed,) = BY_NAME["build_nanogpt"].read(
        "step 100 | loss: 9.1 | lr 6e-04 | loss: 8.0 | norm: 3.0"
    )
    assert mixed.values == {"step": 100, "loss": 9.1, "lr": 6e-4}  # the rest is of another line
    for step in ("nan", "inf", "n/a", "1e9"):
        assert not BY_NAME["nanogpt"].read(f"iter {step}: loss 3.5, time 251.30ms, mfu 31.20%")


def test_code_quotations_and_comments_are_no_data():
    line = "step:12/100 train_time:50ms step_avg:5.00ms"
    assert BY_NAME["modded_nanogpt"].read(line)
    for code in (
        f'print0(f"{line}")',
        f"x = '{line}'",
        f"# {line}",
        f"  // {line}",
        f"as in `{line}`",
        f"foo() # {line}",
    ):
        assert not BY_NAME["modded_nanogpt"].read(code)
    assert not BY_NAME["llmc"].read("step 2000: train loss 3.2104, val loss 3.2345")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('head = "iter {stepp}:"', "must hold {step}"),
        ('head = "iter {step}"\nfeilds = []', "feilds = [] is none of these keys"),
        ('head = "iter {step"', "{step is no part of a template"),
        ("head = ", "declares no dialect"),
        *(
            (f'head = "iter {{step}}"\n{line}', words)
            for line, words in (
                ('fields = ["{minutes*60}"]', "{minutes*60} is no part of a template"),
                ('fields = ["{minutes/0}"]', "{minutes/0} is no part"),
                ('ends = "done"', "ends = 'done' is none of these keys"),
                ('zero_based = "no"', "zero_based = true"),
                ('fields = ["loss {loss}", "mean {loss}"]', "loss is there twice"),
            )
        ),
    ],
)
def test_a_declaration_that_cannot_be_used_is_refused(tmp_path, text, words):
    (tmp_path / "mine.toml").write_text(f'source = "mine"\n{text}\n')
    with pytest.raises(DialectError) as error:
        read_dialects(tmp_path)
    assert words in str(error.value) and "mine.toml" in str(error.value)


def test_the_example_of_the_documentation():
    text = (Path(__file__).parents[2] / "docs/logs.md").read_text()
    declaration = re.search("```toml\n(.*?)```", text, re.S)
    line = re.search("`(.*?)`:\n\n```toml", text)
    assert declaration and line
    dialect = Dialect("mine", **tomllib.loads(declaration[1]))
    (found,) = dialect.read(line[1])
    assert found.values == {"step": 12, "loss": 3.25, "grad_norm": 0.5, "step_ms": 1500}
    assert not dialect.read("[12] loss 3.25; gnorm 0.5; 1.5")
