"""make sample, from what is asked to what is on standard output and which exit code says so."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from settings import ROOT
from settings.config import Config
from tests.train.generate.test_load_run import Run, publish, run  # noqa: F401  (a fixture)
from tests.train.model.test_hf_import import LLAMA
from tests.train.model.test_model import recipe
from train.data import prepare
from train.data.tokenizer import load
from train.generate import sample as sampling
from train.model.generate import continue_text


class Shell:
    """Calls make sample's program with settings and standard input."""

    def __init__(self, monkeypatch, capfd, **settings):
        self.monkeypatch, self.capfd, self.settings = monkeypatch, capfd, settings

    def __call__(
        self,
        stdin=b"",
        terminal=False,
        code=0,
        **settings,
    ):
        """(standard output, standard error)"""

        def show(_, text, *more):
            sys.stderr.write(f"{text % more}\n")

        typed = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
        typed.isatty = lambda: terminal
        with self.monkeypatch.context() as patch:
            for name, value in {**self.settings, **settings}.items():
                patch.setenv(name, str(value))
            patch.setattr(sys, "stdin", typed)
            patch.setattr("logging.Logger.info", show)
            patch.setattr("logging.Logger.error", show)
            patch.setattr("signal.signal", lambda *_: None)
            patch.setattr(os, "_exit", lambda code: sys.exit(code))  # Ctrl-C
            try:
                found = sampling.main()
            except SystemExit as end:  # Ctrl-C
                found = end.code
        assert found == code
        return self.capfd.readouterr()


@pytest.fixture
def sample(
    run,  # noqa: F811
    data,
    tmp_path,
    monkeypatch,
    capfd,
):
    (tmp_path / "own.env").write_text("DEVICE=cpu\n")
    run.store(DTYPE="float32")
    return Shell(
        monkeypatch,
        capfd,
        ENV_FILE=str(tmp_path / "own.env"),
        RUNS_DIR=str(tmp_path),
        RUN_NAME="a-run",
        SAMPLE_TOKENS="12",
        DATA_DIR=data["DATA_DIR"],
        OMP_NUM_THREADS="1",
    )


def test_the_prompt_and_what_the_runs_weights_say_behind_it(sample, run):  # noqa: F811
    opened = run.open()
    expected = continue_text(opened.model, opened.vocabulary, "abcd e", 12, seed=4)
    out, err = sample(PROMPT="abcd e", SEED=4)
    assert out == expected + "\n"
    assert f"{run.folder}/checkpoints/step_0000003: step 3" in err
    assert re.search(r"^\d+ tokens in \d+\.\d\d s, \d+\.\d tokens/s$", err, re.MULTILINE)
    # From standard input, and its line end is the shell's.
    assert sample(b"abcd e\n", SEED=4)[0] == out
    assert sample(b"ab", PROMPT="abcd e", SEED=4)[0] == out
    assert sample(PROMPT="abcd e", SEED=4, STEP=1)[0] != out
    several, _ = sample(PROMPT="abcd e", SAMPLES=2, SEED=3)
    alone = [sample(PROMPT="abcd e", SEED=seed)[0] for seed in (3, 4)]
    assert several == f"==== 1 of 2, SEED=3\n{alone[0]}==== 2 of 2, SEED=4\n{alone[1]}"
    prompt = prepare.source_of(Config(), "python-stdlib").prompt  # as the run's own sample begins
    assert sample(terminal=True)[0].startswith(prompt)


def test_how_tokens_are_chosen_is_a_setting(sample):
    greedy, _ = sample(PROMPT="abcd", SAMPLE_TEMPERATURE=0)
    assert sample(PROMPT="abcd", SAMPLE_TOP_K=1)[0] == greedy
    assert sample(PROMPT="abcd", SAMPLE_TOP_P=1e-6, SAMPLE_TOP_K=0)[0] == greedy
    assert sample(PROMPT="abcd")[0] != greedy


def test_a_text_may_outgrow_seq_len(sample):
    out, err = sample(PROMPT="abcd", SAMPLE_TOKENS=70)
    assert "Context: SEQ_LEN=32 tokens. Older text is dropped." in err
    assert len(out) > 40


@pytest.mark.parametrize(
    ("code", "words", "settings"),
    [
        (64, "SAMPLE_TOKENS=0", {"SAMPLE_TOKENS": 0}),
        (64, "STEP=2", {"STEP": 2}),
        (64, "SAMPLE_TOP_P=2", {"SAMPLE_TOP_P": 2}),
        (78, "RUN_NAME=other", {"RUN_NAME": "other"}),
        (64, "SEQ_LEN=32. Shorten the text.", {"PROMPT": "abcd " * 40}),
        (64, "(environment): Must be text in UTF-8", {"PROMPT": os.fsdecode(b"a\xff")}),
        (64, "its byte 1 is not UTF-8", {"PROMPT": "", "stdin": b"a\xff"}),
    ],
)
def test_what_is_wrong_has_its_exit_code_and_nothing_is_written(sample, code, words, settings):
    out, err = sample(code=code, **{"PROMPT": "a"} | settings)
    assert words in err
    assert out == ""


def test_weights_that_are_no_numbers_say_nothing(sample, monkeypatch):
    def spoilt(*how):
        opened = inner(*how)
        opened.model.layers[1].mlp.up_proj.weight[3, 2] = float("nan")
        return opened

    inner = sampling.open_trained
    monkeypatch.setattr(sampling, "open_trained", spoilt)
    out, err = sample(PROMPT="abcd", code=78)
    assert out == ""
    assert "step_0000003: layers.1.mlp.up_proj.weight holds values that are infinite or NaN" in err


def test_weights_are_cast_once_and_ctrl_c_ends_with_130(sample, monkeypatch):
    dtypes: set[torch.dtype] = set()

    def generate(model, *_):
        dtypes.update(weight.dtype for weight in model.parameters())
        raise KeyboardInterrupt

    monkeypatch.setattr(sampling, "generate", generate)
    assert sample(PROMPT="abcd", DTYPE="bfloat16", code=130)[0] == "abcd\n"
    assert dtypes == {torch.bfloat16}


def test_weights_of_others_begin_from_nothing(sample, tiny, tmp_path, data):
    from transformers import AutoModelForCausalLM

    _, place = publish(tmp_path / "llama", data, recipe(tiny, **LLAMA))
    vocabulary = load(Path(data["TOKENIZER"]))
    begin = torch.tensor([[vocabulary.end_of_text, *vocabulary.encode("abcd e")]])
    how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 12}
    other = AutoModelForCausalLM.from_pretrained(place)
    (whole,) = other.generate(begin, attention_mask=torch.ones_like(begin), **how).tolist()
    assert vocabulary.end_of_text not in whole[1:]
    where = {"RUN_NAME": "of-no-run", "INIT_FROM": place}
    out, err = sample(**where, PROMPT="abcd e", SAMPLE_TEMPERATURE=0)
    assert out == vocabulary.decode(whole[1:]) + "\n"
    assert "llama: imported weights" in err


def test_characters_survive_any_locale(sample, monkeypatch):
    text = "d\u00e9f \u65e5"
    settings = sample.settings | {"PROMPT": text, "SAMPLE_TEMPERATURE": "0"}
    out = sample(**settings)[0]
    assert out.startswith(text)
    locale = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "train.generate.sample"]
    env = {**os.environ, **settings, **locale}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True)
    assert done.stdout.decode() == out
