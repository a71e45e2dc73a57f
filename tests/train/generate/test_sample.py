"""make sample, from what is asked to what is on standard output and which exit code says so."""

import contextlib
import io
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from settings import ROOT
from settings.config import Config
from tests.train.generate.test_load_run import Run, run  # noqa: F401  (a fixture)
from tests.train.model.test_hf_import import LLAMA, published
from tests.train.model.test_model import recipe
from train.data.tokenizer import load
from train.generate import sample as sampling
from train.model.generate import continue_text
from train.model.model import Transformer


class Stdin(io.TextIOWrapper):
    def __init__(self, content: bytes, terminal: bool):
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


class Shell:
    """Calls make sample's program with settings and standard input."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], **settings: str
    ):
        self.monkeypatch, self.capfd, self.settings = monkeypatch, capfd, settings

    def __call__(
        self,
        stdin: bytes = b"",
        terminal: bool = False,
        code: int = 0,
        chat: bool = False,
        **settings: object,
    ) -> tuple[str, str]:
        """(standard output, standard error)"""
        with self.monkeypatch.context() as patch:
            for name, value in {**self.settings, **settings}.items():
                patch.setenv(name, str(value))
            patch.setattr(sys, "stdin", Stdin(stdin, terminal))
            patch.setattr(
                "logging.Logger.info", lambda _, text, *more: sys.stderr.write(f"{text % more}\n")
            )
            patch.setattr(
                "logging.Logger.error", lambda _, text, *more: sys.stderr.write(f"{text % more}\n")
            )
            patch.setattr("signal.signal", lambda *_: None)
            patch.setattr(os, "_exit", sys.exit)  # Ctrl-C
            with contextlib.suppress(SystemExit):
                assert sampling.main(chat) == code
                return self.capfd.readouterr()
            assert code == 130
        return self.capfd.readouterr()


@pytest.fixture
def sample(
    run: Run,  # noqa: F811
    data: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Shell:
    (tmp_path / "own.env").write_text("DEVICE=cpu\n")
    facts = json.loads((run.folder / "config.json").read_text())
    facts["settings"]["DTYPE"] = "float32"
    (run.folder / "config.json").write_text(json.dumps(facts))
    return Shell(
        monkeypatch,
        capfd,
        ENV_FILE=str(tmp_path / "own.env"),
        RUNS_DIR=str(tmp_path),
        RUN_NAME="a-run",
        SAMPLE_TOKENS="12",
        DATA_DIR=data["DATA_DIR"],
    )


def test_the_prompt_and_what_the_runs_weights_say_behind_it(sample: Shell, run: Run) -> None:  # noqa: F811
    opened = run.open()
    model = Transformer(opened.config)
    model.load_state_dict(
        run.weights[3] | {"lm_head.weight": run.weights[3]["embed_tokens.weight"]}
    )
    model.dtype = torch.float32
    expected = continue_text(model, load(Path(run.config.tokenizer)), "abcd e", 12, seed=4)
    out, err = sample(PROMPT="abcd e", SEED=4)
    assert out == expected + "\n"
    assert f"{run.folder}/checkpoints/step_0000003: step 3" in err
    assert re.search(r"^\d+ tokens in \d+\.\d\d s, \d+\.\d tokens/s$", err, re.MULTILINE)
    assert (
        sample(b"abcd e\n", SEED=4)[0] == out
    )  # from standard input, and its line end is the shell's
    assert sample(b"ab", PROMPT="abcd e", SEED=4)[0] == out
    assert sample(PROMPT="abcd e", SEED=4, STEP=1)[0] != out


def test_several_come_one_behind_another_each_as_if_it_were_asked_for_alone(sample: Shell) -> None:
    out, _ = sample(PROMPT="abcd", SAMPLES=3, SEED=8)
    alone = [sample(PROMPT="abcd", SEED=8 + number)[0] for number in range(3)]
    assert out == "".join(
        f"==== {n + 1} of 3, SEED={8 + n}\n{text}" for n, text in enumerate(alone)
    )
    assert len(set(alone)) == 3


def test_how_tokens_are_chosen_is_a_setting(sample: Shell) -> None:
    greedy = {sample(PROMPT="abcd", SAMPLE_TEMPERATURE=0, SEED=seed)[0] for seed in (1, 2)}
    assert len(greedy) == 1
    for one in ({"SAMPLE_TOP_K": 1}, {"SAMPLE_TOP_P": 1e-6, "SAMPLE_TOP_K": 0}):
        assert {sample(PROMPT="abcd", SEED=1, **one)[0]} == greedy
    assert {sample(PROMPT="abcd", SEED=seed)[0] for seed in (1, 2, 3)} - greedy


@pytest.mark.parametrize("terminal", [False, True])
def test_without_a_prompt_it_begins_as_the_sample_at_the_end_of_the_run(
    sample: Shell, terminal: bool
) -> None:
    from train.data import prepare

    prompt = prepare.source_of(Config(), "python-stdlib").prompt
    assert prompt and sample(terminal=terminal)[0].startswith(prompt)


def test_a_text_may_outgrow_seq_len_and_a_prompt_may_not(sample: Shell) -> None:
    out, err = sample(PROMPT="abcd", SAMPLE_TOKENS=70)
    assert "Context: SEQ_LEN=32 tokens. Older text is dropped." in err and len(out) > 40
    _, err = sample(PROMPT="abcd " * 40, code=64)
    assert re.search(r"PROMPT: \d+ tokens, and the context is SEQ_LEN=32\. Shorten the text\.", err)


def test_what_is_wrong_has_its_exit_code_and_nothing_is_written(sample: Shell, run: Run) -> None:  # noqa: F811
    for code, said, settings in (
        (64, "SAMPLE_TOKENS=0", {"SAMPLE_TOKENS": 0}),
        (64, "STEP=2", {"STEP": 2}),
        (64, "N_LAYER=9", {"N_LAYER": 9}),
        (64, "SAMPLE_TOP_P=2", {"SAMPLE_TOP_P": 2}),
        (78, "RUN_NAME=other", {"RUN_NAME": "other"}),
    ):
        out, err = sample(PROMPT="a", code=code, **settings)
        assert said in err and out == ""
    assert "its byte 1 is not UTF-8" in sample(b"a\xff", code=64)[1]
    shutil.rmtree(run.folder / "checkpoints")
    assert "has no checkpoint yet" in sample(PROMPT="a", code=78)[1]


def test_weights_that_are_no_numbers_say_nothing(
    sample: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(*how: object) -> object:
        opened = inner(*how)
        opened.model.layers[1].mlp.up_proj.weight[3, 2] = float("nan")
        return opened

    inner = sampling.open_trained
    monkeypatch.setattr(sampling, "open_trained", spoilt)
    out, err = sample(PROMPT="abcd", code=78)
    assert (
        out == ""
        and "step_0000003: layers.1.mlp.up_proj.weight holds values that are infinite or NaN" in err
    )


def test_weights_are_cast_once_and_not_for_each_token(
    sample: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes: set[torch.dtype] = set()

    def generate(model: Transformer, *rest: Any) -> Any:
        dtypes.update(weight.dtype for weight in model.parameters())
        return inner(model, *rest)

    inner = sampling.generate
    monkeypatch.setattr(sampling, "generate", generate)
    sample(PROMPT="abcd", DTYPE="bfloat16")
    assert dtypes == {torch.bfloat16}


def test_ctrl_c_ends_with_130(sample: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sampling, "generate", interrupted)
    assert sample(PROMPT="abcd", code=130)[0] == "abcd\n"


def test_weights_of_others_begin_from_nothing(
    sample: Shell, tiny: Config, tmp_path: Path, data: dict[str, str]
) -> None:
    other = published(tmp_path / "llama", recipe(tiny, **LLAMA))
    shutil.copy(data["TOKENIZER"], tmp_path / "llama" / "tokenizer.json")
    vocabulary = load(Path(data["TOKENIZER"]))
    begin = torch.tensor([[vocabulary.end_of_text, *vocabulary.encode("abcd e")]])
    whole = other.generate(
        begin,
        attention_mask=torch.ones_like(begin),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, 1:].tolist()
    assert len(whole) == begin.shape[1] - 1 + 12 and vocabulary.end_of_text not in whole
    out, err = sample(
        RUN_NAME="of-no-run", INIT_FROM=tmp_path / "llama", PROMPT="abcd e", SAMPLE_TEMPERATURE=0
    )
    assert out == vocabulary.decode(whole) + "\n" and "llama: imported weights" in err


def test_characters_survive_any_locale_and_bytes_that_are_none_are_refused(
    sample: Shell, data: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "d\u00e9f \u65e5"
    said = sample(PROMPT=text, SAMPLE_TEMPERATURE=0)[0]
    assert said.startswith(text)
    for name, value in {
        **sample.settings,
        "PROMPT": text,
        "SAMPLE_TEMPERATURE": "0",
        "LC_ALL": "POSIX",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "OMP_NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(
        [sys.executable, "-m", "train.generate.sample"], cwd=ROOT, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout.decode()) == (0, said), done.stderr
    refused = sample(PROMPT=os.fsdecode(b"a\xff"), code=64)[1]
    assert "(environment): Must be text in UTF-8" in refused


# ---- Conversations


def test_a_message_is_answered(sample: Shell) -> None:
    out, _ = sample(PROMPT="abcd", chat=True)
    assert (
        not out.startswith("abcd") and out.endswith("\n") and sample(b"abcd", chat=True)[0] == out
    )
    assert "PROMPT is not set" in sample(b"", chat=True, code=64)[1]
    both, _ = sample(PROMPT="abcd", chat=True, SAMPLES=2)
    assert both.startswith(f"==== 1 of 2, SEED=1337\n{out}==== 2 of 2, SEED=1338\n")


def test_a_conversation_leaves_room_for_an_answer(
    sample: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(sampling, "write", lambda opened, ids, stops: asked.append(len(ids)) or "a")
    _, err = sample(b"abcd\n" * 12, terminal=True, chat=True, SAMPLE_TOKENS=10)
    assert len(asked) == 12 and 32 - 10 - 8 < max(asked) <= 32 - 10 and "forgotten" in err
    assert "Older text" not in err
    asked.clear()
    _, err = sample(b"abcd\n" * 3, terminal=True, chat=True, SAMPLE_TOKENS=70)
    assert max(asked) <= 16 and err.count("Older text is dropped") == 3


def test_a_tokenizer_without_the_tokens_is_refused_before_anything_is_asked(
    sample: Shell,
    run: Run,  # noqa: F811
    tmp_path: Path,
    tiny: Config,
) -> None:
    text = Path(run.config.tokenizer).read_text().replace('"<|assistant|>"', '"<|other|>"')
    published(tmp_path / "llama", recipe(tiny, **LLAMA))
    (tmp_path / "llama" / "tokenizer.json").write_text(text)
    for terminal in (False, True):
        out, err = sample(
            b"a\n",
            terminal=terminal,
            code=78,
            chat=True,
            RUN_NAME="none",
            INIT_FROM=tmp_path / "llama",
        )
        assert out == "" and "it lacks <|assistant|>" in err and "> " not in err.replace("|> ", "")


def read_until(terminal: int, what: bytes, seconds: float = 60) -> bytes:
    """What a terminal shows, up to and with this; all of it where its program ends first."""
    shown, deadline = b"", time.monotonic() + seconds
    while what not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 0.5)[0]:
            try:
                shown += os.read(terminal, 4096)
            except OSError:  # Linux says so where the other end is closed
                return shown
    return shown


def test_a_conversation_at_a_real_terminal_ends_with_ctrl_d(sample: Shell) -> None:
    answer = sample(PROMPT="ab", chat=True, SAMPLE_TOKENS=3)[0].rstrip("\n")
    ours, theirs = pty.openpty()
    settings = {
        **os.environ,
        **sample.settings,
        "SAMPLE_TOKENS": "3",
        "OMP_NUM_THREADS": "1",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "train.generate.sample", "chat"],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=settings,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        try:
            assert b"Ctrl-D exits" in read_until(ours, b"\n> ")
            os.write(ours, b"\xff\n")
            assert b"its byte 0 is not UTF-8" in read_until(ours, b"\n> ")
            os.write(ours, b"ab\n")
            shown = read_until(ours, b"\n> ").decode().replace("\r\n", "\n")
            assert shown.startswith(f"ab\n{answer}\n") and re.search(r"\d+ tokens in ", shown)
            os.write(ours, b"\x04")
            read_until(ours, b"never said")
            assert process.wait(120) == 0
        finally:
            process.kill()
            os.close(ours)
