"""train/replay.py: losses of a refused step, compared with the model and the data opened here."""

import re
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy

from record.recorder import Recorder
from record.run_paths import RunPaths
from settings.config import Config
from tests.running import environment, tensors, train
from tests.train.making import ALONE
from train import replay
from train.data import prepare
from train.data.batch import Loader
from train.generate import command
from train.model.model import build

ROW = re.compile(r" (\d+\.\d{4}) +(\d+)  python-stdlib:epoch 0:\S+:window \d+$", re.MULTILINE)


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
    batch = Loader(config, sources, ALONE, vocabulary.end_of_text).batch(samples.start // 16)
    assert list(batch.samples) == list(samples)
    tokens = torch.cat([part[0] for part in batch.micro_batches])
    targets = torch.cat([part[1] for part in batch.micro_batches])
    logits = model(tokens).double()
    losses = cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)
    return dict(zip(samples, losses.tolist(), strict=True))


def test_each_sample_of_a_refused_step_has_its_loss(tmp_path, data, monkeypatch, caplog):
    caplog.set_level("INFO")
    env = environment(tmp_path, data, MAX_STEPS=12, SAVE_EVERY=4, KEEP_LAST=9)
    train(env)
    recorder = Recorder(RunPaths(tmp_path / "run"), True, 1, 12, 5)
    facts = {"loss": None, "grad_norm": 2.5, "step_ms": 1.0, "names": []}
    for first in (160, 192):
        recorder.event("skip", 11, 0, reason="nonfinite", samples=[first, first + 15], **facts)
    recorder.close()

    assert call(env, monkeypatch, STEP="11") == 0
    assert "step_0000008" in caplog.text
    refused = "step 11 was refused (nonfinite): loss not finite, gradient norm 2.5"
    assert caplog.text.count(refused) == 2
    rows = [(float(loss), int(sample)) for loss, sample in ROW.findall(caplog.text)]
    assert len(rows) == 20
    for part, first in ((rows[:10], 160), (rows[10:], 192)):
        expected = expected_losses(env, tmp_path / "run", range(first, first + 16))
        highest = sorted(expected.values(), reverse=True)[:10]
        for losses in (highest, [expected[sample] for _, sample in part]):
            assert [loss for loss, _ in part] == pytest.approx(losses, abs=1e-4)

    paths = RunPaths(tmp_path / "run")
    assert [replay.choose_checkpoint(step, paths) for step in (11, 3)] == [8, 4]
    for settings, code, words in (
        ({"STEP": "10"}, 64, "STEP=10 was not refused. Refused steps of run: 11."),
        ({"STEP": ""}, 64, "STEP is not set. Refused steps of run: 11."),
        ({"RUN_NAME": "another"}, 78, "there is no record"),
    ):
        assert call(env, monkeypatch, **settings) == code
        assert words in caplog.text
