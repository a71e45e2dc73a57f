"""make chat, and make sample of a fine-tuned run: what is written, by one token at a time through the bare model."""

import dataclasses
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune import chat, model_folder
from finetune.chat import Chat, Stream
from finetune.model_folder import Weights
from settings import ROOT, load_preset
from tests.export.exported import LLAMA, Run, make_run
from tests.finetune.making import THINKS, their_tokenizer
from tests.finetune.models import models, theirs, write_model
from tests.running import environment
from train.generate import sample as pretrained

__all__ = ["models"]  # a fixture

CPU = torch.device("cpu")
ASKS = ["Why?", "Is it so? It is so. Why is it so?", "2+2?"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def settings_of(**settings: str) -> Any:
    return load_preset(
        **{"SAMPLE_TEMPERATURE": "0", "SAMPLE_TOKENS": "9", "DEVICE": "cpu"} | settings
    )


@pytest.mark.parametrize("kind", ["llama", "gemma2", "glm4_moe"])
def test_replies_of_a_batch_are_those_of_one_at_a_time(models: dict[str, Path], kind: str) -> None:
    opened = Chat(Weights(models[kind]), settings_of(), CPU)
    bare = theirs(models[kind])
    prompts = [opened.template.prompt_ids([user(text)]) for text in ASKS]
    assert len(set(map(len, prompts))) == 3  # so two of them are padded
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(9):
            with torch.no_grad():
                ids.append(int(bare(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in opened.template.stop_ids:
                break
        expected.append(ids[len(prompt) :])
    assert opened.reply_ids(prompts, 9) == expected
    opened.template.stop_ids = [expected[0][2]]  # a reply ends with its stop token
    assert opened.reply_ids(prompts[:1], 9) == [
        expected[0][: expected[0].index(expected[0][2]) + 1]
    ]


class Shell:
    """Calls a command with settings and standard input."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: Any, settings: dict[str, str]):
        self.monkeypatch, self.capfd, self.settings = monkeypatch, capfd, settings

    def __call__(self, stdin: str = "", code: int = 0, work: Any = None, **settings: Any) -> Any:
        """Return (standard output, standard error)."""

        def show(_: object, text: str, *more: object) -> None:
            sys.stderr.write(f"{text % more}\n")

        with self.monkeypatch.context() as patch:
            for name in list(os.environ):  # `make test` has goals of its own
                if name.startswith("MAKE"):
                    patch.delenv(name)
            for name, value in {**self.settings, **settings}.items():
                patch.setenv(name, str(value))
            typed = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
            patch.setattr(sys, "stdin", typed)
            patch.setattr("logging.Logger.info", show)
            patch.setattr("logging.Logger.error", show)
            patch.setattr("signal.signal", lambda *_: None)
            found = chat.run_command(work or chat.talk, sys.stderr)
        captured = self.capfd.readouterr()
        assert found == code, captured.err
        return captured


@pytest.fixture
def shell(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> Shell:
    settings = environment(tmp_path, {}, MAKE_TARGET="chat", SAMPLE_TOKENS=9)
    settings |= {"RUN_NAME": "none", "INIT_FROM": str(models["llama"])}
    return Shell(monkeypatch, capfd, settings)


def test_the_reply_alone_is_on_standard_output(shell: Shell, models: dict[str, Path]) -> None:
    opened = Chat(Weights(models["llama"]), settings_of(), CPU)
    prompt = opened.template.prompt_ids([user("Why?")])
    (ids,) = opened.reply_ids([prompt], 9)
    out, err = shell("Why?\n", SAMPLE_TEMPERATURE=0)
    assert out == opened.template.read_reply(ids) + "\n"
    assert "LlamaForCausalLM, 0.04M parameters, context 512, on cpu" in err
    assert re.search(r"^\d+ tokens in \d+\.\d\d s, \d+\.\d tokens/s$", err, re.MULTILINE)
    assert shell("Why?", SAMPLE_TOP_K=1)[0] == out
    assert shell("Why?", SAMPLE_TOP_P=1e-6, SAMPLE_TOP_K=0)[0] == out
    drawn = shell("Why?", SEED=3, SAMPLE_TEMPERATURE=5)[0]
    assert drawn != out and shell("Why?", SEED=3, SAMPLE_TEMPERATURE=5)[0] == drawn


def test_what_generation_config_says_changes_nothing(
    shell: Shell, models: dict[str, Path], tmp_path: Path
) -> None:
    expected = shell("Why?", SAMPLE_TEMPERATURE=0)[0]
    folder = write_model("llama", tmp_path / "llama")
    defaults = {"repetition_penalty": 9.0, "do_sample": True, "temperature": 3.0, "top_k": 7}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    assert shell("Why?", SAMPLE_TEMPERATURE=0, INIT_FROM=folder)[0] == expected


@pytest.mark.parametrize(
    ("code", "words", "settings"),
    [
        (64, "SAMPLE_TOKENS=0", {"SAMPLE_TOKENS": 0}),
        (64, "PROMPT is not set and standard input is empty", {"stdin": ""}),
        (64, "There is no such folder", {"INIT_FROM": "models/none"}),
        (64, "the context of the model is 512. Shorten the text.", {"stdin": "2+2?" * 200}),
        (78, "There is no run none in", {"INIT_FROM": ""}),
    ],
)
def test_what_is_wrong_has_its_exit_code(
    shell: Shell, code: int, words: str, settings: dict[str, Any]
) -> None:
    out, err = shell(code=code, **{"stdin": "Why?"} | settings)
    assert words in err and out == ""


def test_damaged_weights_are_refused(shell: Shell, tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "llama")
    path = sorted(folder.glob("model-*.safetensors"))[-1]
    held = load_file(path)
    name = sorted(held)[0]
    held[name].view(-1)[1] = float("nan")
    save_file(held, path, metadata={"format": "pt"})
    out, err = shell("Why?", code=78, INIT_FROM=folder)
    assert f"{name} holds values that are infinite or NaN" in err and out == ""
    path.unlink()
    out, err = shell("Why?", code=78, INIT_FROM=folder)
    assert path.name in err and out == ""


def test_a_template_that_refuses_a_message_says_so(shell: Shell, tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "llama")
    template = folder / "chat_template.jinja"
    refusal = (
        "{% if '!' in messages[0]['content'] %}{{ raise_exception('No shouting') }}{% endif %}"
    )
    template.write_text(refusal + template.read_text())
    assert (
        "The chat template refuses this: it says: No shouting."
        in shell("Why!", code=78, INIT_FROM=folder).err
    )
    template.unlink()
    assert "has no chat template" in shell("Why?", code=78, INIT_FROM=folder).err


# ---- Runs


@pytest.fixture
def run(tiny: Any, data: dict[str, str], tmp_path: Path) -> Run:
    made = dataclasses.replace(tiny, tokenizer=data["TOKENIZER"], seq_len=64, **LLAMA)
    return make_run(tmp_path, made, steps=(2, 3))


def test_a_run_is_exported_when_it_is_talked_to(shell: Shell, run: Run) -> None:
    where: dict[str, Any] = {"RUN_NAME": "a-run", "INIT_FROM": ""}
    first, err = shell("abcd", **where)
    assert f"Exporting step 3 of a-run to {run.export}." in err
    assert re.search(r"The export takes \d.* of disk\.", err)
    assert "a-run was not fine-tuned: it has never seen a conversation." in err
    again, err = shell("abcd", **where)
    assert "Exporting" not in err and again == first
    assert "Exporting step 2" in shell("abcd", STEP=2, **where).err
    err = shell("abcd", STEP=7, code=64, **where).err
    assert "STEP=7: Run a-run has no checkpoint of that step. There are: 3, 2." in err


def test_a_fine_tuned_run_continues_a_text_by_its_own_class(
    shell: Shell, run: Run, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    where: dict[str, Any] = {
        "RUN_NAME": "a-run",
        "INIT_FROM": "",
        "MAKE_TARGET": "sample",
        "SAMPLE_TEMPERATURE": 0,
    }
    monkeypatch.setattr(model_folder, "export_run", lambda *_: models["gemma2"])
    facts = json.loads((run.folder / "config.json").read_text())
    facts["settings"]["MODEL"] = "base"
    (run.folder / "config.json").write_text(json.dumps(facts))
    out, err = shell("It is", work=chat.continue_text, SAMPLES=2, **where)
    assert "Gemma2ForCausalLM" in err
    bare, tokenizer = theirs(models["gemma2"]), their_tokenizer(None)
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer("It is")["input_ids"]]])
    seen = torch.ones_like(ids)
    written = bare.generate(ids, attention_mask=seen, max_new_tokens=9, do_sample=False)
    text = tokenizer.decode(written[0], skip_special_tokens=True)
    assert out == f"==== 1 of 2, SEED=1337\n{text}\n==== 2 of 2, SEED=1338\n{text}\n"
    facts["settings"]["MODEL"] = ""
    (run.folder / "config.json").write_text(json.dumps(facts))
    monkeypatch.setattr(pretrained, "run", lambda c, world: 71 if c.run_name == "a-run" else 0)
    shell("It is", work=chat.continue_text, code=71, **where)


# ---- Conversations


def test_a_reply_is_shown_as_it_comes_and_without_its_thoughts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = their_tokenizer(THINKS)
    tokenizer.save_pretrained(str(tmp_path))
    opened = Chat.__new__(Chat)
    opened.template = chat.ChatTemplate(tmp_path)
    parts: list[str] = []
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    stream = Stream(opened.read_reply)
    stream.write = parts.append  # type: ignore[method-assign, assignment]
    stream.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for text in ("<think>\n\n", "</think>\n\n", "It is d\u00e9f.", " Why?<|im_end|>"):
        for token in tokenizer(text)["input_ids"]:
            stream.put(torch.tensor([token]))
        if "It" in text:
            assert "".join(parts) == "It is d\u00e9f."
    stream.end()
    assert "".join(parts) == "It is d\u00e9f. Why?\n"
    assert len(parts) > 4 and "\ufffd" not in "".join(parts)


def test_the_oldest_messages_are_forgotten_and_the_system_message_is_kept(
    models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    opened = Chat(Weights(models["llama"]), settings_of(SAMPLE_TOKENS="200"), CPU)
    system = {"role": "system", "content": "abc"}
    talk = [system]
    for number in range(40):
        talk += [user(f"Is it {number}?"), {"role": "assistant", "content": "It is so."}]
    caplog.set_level("INFO")
    kept = opened.forget_oldest([*talk, user("Why?")])
    assert kept[0] == system and kept[-1] == user("Why?") and kept[1]["role"] == "user"
    forgotten = len(talk) + 1 - len(kept)
    assert f"the oldest {forgotten} messages are forgotten" in caplog.text
    assert len(opened.prompt_ids(kept)) <= 512 - 200
    longer = kept[:1] + talk[forgotten - 1 : forgotten + 1] + kept[1:]
    assert len(opened.prompt_ids(longer)) > 512 - 200


def read_until(terminal: int, what: bytes, seconds: float = 60) -> str:
    """Return what a terminal shows up to this, or all of it if its program ends first."""
    shown, deadline = b"", time.monotonic() + seconds
    while what not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 0.5)[0]:
            try:
                shown += os.read(terminal, 4096)
            except OSError:  # Linux says so where the other end is closed
                break
    return shown.decode(errors="replace").replace("\r\n", "\n")


def test_a_conversation_at_a_real_terminal(shell: Shell) -> None:
    first = shell("2+2?", SAMPLE_TEMPERATURE=0)[0].rstrip("\n")
    ours, their_end = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "finetune.chat"],
        cwd=ROOT,
        stdin=their_end,
        stdout=their_end,
        stderr=their_end,
        env=shell.settings | {"SAMPLE_TEMPERATURE": "0", "COLUMNS": "999"},
        start_new_session=True,
    ) as process:
        os.close(their_end)

        def say(text: bytes) -> str:
            os.write(ours, text + b"\n")
            return read_until(ours, b"\n> ").partition("\n")[2]

        try:
            assert "/exit or Ctrl-D exits" in read_until(ours, b"\n> ")
            assert "its byte 0 is not UTF-8" in say(b"\xff")
            assert say(b"2+2?").split("\n")[0].split() == first.split("\n")[0].split()
            second = say(b"2+2?")  # with the first one before it
            assert say(b"/reset").startswith("(a new conversation)")
            assert say(b"2+2?").split("\n")[0].split() == first.split("\n")[0].split()
            assert say(b"2+2?").split("\n")[0] == second.split("\n")[0]
            say(b"/system abc")
            assert say(b"2+2?").split("\n")[0].split() != first.split("\n")[0].split()
            os.write(ours, b"\x04")
            read_until(ours, b"never said")
            assert process.wait(120) == 0
        finally:
            process.kill()
            os.close(ours)


def test_ctrl_c_stops_a_reply_and_not_the_conversation(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = Chat(Weights(models["llama"]), settings_of(SAMPLE_TOKENS="400"), CPU)
    before = signal.getsignal(signal.SIGINT)
    real = Stream.put

    def put(stream: Stream, ids: torch.Tensor) -> None:
        real(stream, ids)
        if len(stream.ids) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Stream, "put", put)
    caplog.set_level("INFO")
    talk = opened.take_turn([], "Why?")
    assert "(stopped)" in caplog.text and signal.getsignal(signal.SIGINT) is before
    assert [message["role"] for message in talk] == ["user", "assistant"]
