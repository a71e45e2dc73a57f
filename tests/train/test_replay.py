"""train/replay.py: losses of a refused step, compared with the model and the data opened here."""

import math
import re
import sys

import pytest
import torch

from record import status
from record.metrics import Recorder
from record.run_paths import RunPaths
from settings.config import Config
from tests.faults import test_data
from tests.faults.inject import Fault, faulty
from tests.running import environment, events, tensors, train
from tests.train.making import ALONE
from train import replay
from train.data import prepare
from train.data.batch import Loader
from train.generate import command
from train.model.model import build

ROW = re.compile(r"^ *(\d+\.\d{4}) +(\d+)  (python-stdlib:epoch 0:\S+:window \d+)$", re.MULTILINE)


def call(env, monkeypatch, **settings):
    """`make replay` in this process."""
    for name, value in (env | settings).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    return command.run_command(replay.replay, sys.stdout)


def expected_losses(env, weights, samples):
    """Cross-entropy of each sample by torch alone, with the weights of step 8."""
    config = Config.load(env)
    model = build(config, torch.device("cpu"))
    stored = tensors(weights, 8)
    for name, weight in model.named_parameters():
        weight.data.copy_(stored[f"model.{name}"])
    vocabulary = prepare.vocabulary(config)
    sources = prepare.open_sources(config, vocabulary)
    loader = Loader(config, sources, ALONE, vocabulary.end_of_text)
    losses = {}
    for step in range(samples.start // 16, samples.stop // 16):
        batch = loader.batch(step)
        tokens = torch.cat([part[0] for part in batch.micro_batches])
        targets = torch.cat([part[1] for part in batch.micro_batches])
        for row, sample in enumerate(batch.samples):
            logits = model(tokens[row : row + 1])[0]
            loss = torch.nn.functional.cross_entropy(logits.double(), targets[row])
            losses[sample] = loss.item()
    return losses


def test_each_sample_of_a_refused_step_has_its_loss(
    tmp_path,
    data,
    monkeypatch,
    caplog,
):
    caplog.set_level("INFO")
    env = environment(tmp_path, data, MAX_STEPS=12, SAVE_EVERY=4, KEEP_LAST=9)
    train(env)
    recorder = Recorder(RunPaths(tmp_path / "run"), True, 1, 12, 5)
    facts = {"loss": None, "grad_norm": 2.5, "step_ms": 1.0, "names": []}
    for first in (160, 192):
        recorder.event("skip", 11, 0, reason="nonfinite", samples=[first, first + 15], **facts)
    recorder.close()

    assert call(env, monkeypatch, STEP="11") == 0
    out = "\n".join(record.getMessage() for record in caplog.records)
    assert "step_0000008" in out
    assert out.count("step 11 was refused (nonfinite): loss not finite, gradient norm 2.5") == 2
    rows = [(float(loss), int(sample)) for loss, sample, _ in ROW.findall(out)]
    assert len(rows) == 20
    for part, first in ((rows[:10], 160), (rows[10:], 192)):
        expected = expected_losses(env, tmp_path / "run", range(first, first + 16))
        highest = sorted(expected.values(), reverse=True)[:10]
        assert [loss for loss, _ in part] == pytest.approx(highest, abs=1e-4)
        assert [loss for loss, _ in part] == pytest.approx(
            [expected[sample] for _, sample in part], abs=1e-4
        )

    paths = RunPaths(tmp_path / "run")
    assert replay.choose_checkpoint(11, paths) == 8
    assert replay.choose_checkpoint(3, paths) == 4

    assert call(env, monkeypatch, STEP="10") == 64
    assert "STEP=10 was not refused. Refused steps of run: 11." in caplog.text
    monkeypatch.delenv("STEP")
    assert call(env, monkeypatch) == 64
    assert "STEP is not set. Refused steps of run: 11." in caplog.text
    assert call(env, monkeypatch, RUN_NAME="another") == 78
    assert "there is no record" in caplog.text


def test_the_text_of_a_refused_step_is_in_record_status_and_replay(
    tmp_path, data, monkeypatch, caplog
):
    caplog.set_level("INFO")
    texts = [f"\x1b[31m text {i} \u202e" + "abcd efgh " * (i % 7 + 3) for i in range(80)]
    rows = [test_data.row(f"p{i}", text) for i, text in enumerate(texts)]
    env = environment(
        tmp_path,
        test_data.papers(tmp_path, data, b"".join(rows)),
        **{"MAX_STEPS": 8, "SAVE_EVERY": 1, "EVAL_TOKENS": 256, "SAMPLE_TOKENS": 0},
    )
    prepare.prepare(Config.load(env))
    bad = Fault("forward", "multiply", samples=(32, 80), value=math.nan, every=True)
    train(faulty(env, tmp_path, bad))

    skips = events(tmp_path / "run", "skip")
    (rollback,) = events(tmp_path / "run", "rollback")
    assert [skip["step"] for skip in skips] == [3, 3, 3] and rollback["step"] == 2
    assert rollback["documents"][0]["sample"] == 32
    for first, skip in zip((32, 48, 64), skips, strict=True):
        assert 16 <= len(skip["documents"]) <= 32
        assert skip["documents"][0]["sample"] == first
        for document in skip["documents"]:
            assert document["file"] == f"{tmp_path}/papers/0.jsonl"
            text = texts[document["row"] - 1]
            shown = text.replace("\x1b", r"\x1b").replace("\u202e", r"\u202e")
            assert document["text"] in shown and document["text"][:12] == shown[:12]

    shown = status.describe_skip(RunPaths(tmp_path / "run"))
    assert "step 3 was skipped (nonfinite). Its text:" in shown
    for document in skips[-1]["documents"][:8]:
        line = f"papers {tmp_path}/papers/0.jsonl:{document['row']}: {document['text']}"
        assert f"{'':30} {line[:200]}\n" in shown
    assert f"and {len(skips[-1]['documents']) - 8} more in" in shown
    assert shown.replace("\n", "").isprintable()

    assert call(env, monkeypatch, STEP="3") == 0
    lines = [record.getMessage() for record in caplog.records]
    heads = [number for number, line in enumerate(lines) if "  papers:epoch " in line]
    assert len(heads) == 30
    for number in heads:
        begin = f"{'':22}papers {tmp_path}/papers/0.jsonl:"
        assert lines[number + 1].startswith(begin) and r": \x1b[31m text" in lines[number + 1]
