"""Questions and what is answered right, against one question at a time through the bare model."""

import collections
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from export import place
from finetune import chat_eval
from finetune.chat import Chat
from finetune.chat_eval import ask, is_same, read_questions, score
from finetune.model_folder import Weights
from finetune.row_shapes import Conversation
from settings import load_preset
from settings.config import Config
from tests.conftest import SHARED
from tests.finetune.making import BRACKETS, CHATML, THINKS, row, their_tokenizer, write_rows
from tests.finetune.models import models, theirs, write_model
from tests.running import environment, train
from train.data.sources.source import CorpusError
from train.distributed.world import World

__all__ = ["models"]  # a fixture

CPU = torch.device("cpu")
ALONE = World(0, 0, 0, 1, CPU, "CPU", "here")
WORDS = ["abc", "def", "ghi", "hello", "world", "user"]


def choices(count: int) -> list[dict[str, Any]]:
    """Rows with three options, the right one of which moves."""
    rows = []
    for i in range(count):
        words = [WORDS[i % 6], WORDS[(i + 1) % 6], WORDS[(i + 2) % 6]]
        rows.append(
            {
                "question": f"{WORDS[i % 6]} {i} {' '.join(WORDS[: i % 5])}?",
                "options": dict(zip("ABC", words, strict=True)),
                "answer_idx": "ABC"[i % 3],
                "answer": words[i % 3],
            }
        )
    return rows


def config_of(path: Path, **more: str) -> Config:
    folder = path.parent / "data"
    return load_preset(EVAL_DATA=str(path), EVAL_EXAMPLES="0", DATA_DIR=str(folder), **more)


@pytest.fixture(params=[CHATML, BRACKETS, THINKS], ids=["chatml", "mistral", "qwen3"])
def chat(request: pytest.FixtureRequest, tmp_path: Path) -> Chat:
    """A model of random weights, with a template that puts no header, or more, before a reply."""
    folder = write_model("llama", tmp_path / "model")
    their_tokenizer(request.param).save_pretrained(str(folder))
    return Chat(Weights(folder), load_preset(DEVICE="cpu"), CPU)


@torch.no_grad()
def likeliest(model: Any, ids: list[int]) -> torch.Tensor:
    """Return the logits of the next token of one text."""
    logits: torch.Tensor = model(torch.tensor([ids])).logits[0, -1]
    return logits


def test_answers_are_those_of_one_question_at_a_time(chat: Chat, tmp_path: Path) -> None:
    bare = theirs(tmp_path / "model")
    template, tokenizer = chat.template, chat.template.tokenizer
    prompts, replies = [], []
    asks = [[{"role": "user", "content": f"{word} {i}?"}] for i, word in enumerate(WORDS * 2)]
    for messages in asks:
        ids = prompts_ids = template.prompt_ids(messages)
        for _ in range(64):
            ids = [*ids, int(likeliest(bare, ids).argmax())]
        prompts.append(prompts_ids)
        replies.append(ids[len(prompts_ids) :])
    # Random weights never end a reply: the token that most replies contain shall do it.
    tokens = collections.Counter(token for reply in replies for token in set(reply[2:10]))
    (stop, _), *_ = tokens.most_common()
    template.stop_ids = [stop]
    right, stopped, written = 0, 0, []
    for i, (messages, prompt, reply) in enumerate(zip(asks, prompts, replies, strict=True)):
        text = template.read_reply(reply)
        answer = f" {text.upper()}. " if i % 3 and text else "It is so."
        messages = [*messages, {"role": "assistant", "content": answer}]
        written.append(Conversation(messages))
        whole = template.render(messages)
        most = 2 * (len(tokenizer(whole)["input_ids"]) - len(prompt)) + 8
        right += stop in reply[:most] and is_same(text, answer)
        stopped += stop in reply[:most]
    assert 0 < right < 12
    rows = write_rows(tmp_path / "rows.jsonl", choices(31))
    read, facts = read_questions(config_of(rows))
    questions = read[str(rows)]
    assert facts["rows"] == len(questions) == 31
    found = ask(chat, [*questions, *written], ALONE, 4)
    counts = found["written"]
    assert (counts.right, counts.stopped, counts.asked) == (right, stopped, 12)

    expected = 0
    for question in questions:
        before = template.render(
            [*question.messages[:-1], {"role": "assistant", "content": "A. x"}]
        )
        before = before[: before.rindex("A. x")]
        scores = []
        for letter in "ABC":
            ids = tokenizer(f"{before}{letter}. x", add_special_tokens=False)["input_ids"]
            place = [tokenizer.decode(token).strip()[-1:] for token in ids].index(
                letter, len(ids) - 5
            )
            scores.append(float(likeliest(bare, ids[:place])[ids[place]]))
        chosen = question.options[scores.index(max(scores))]
        expected += chosen == question.messages[-1]["content"]
    counts = found["choice"]
    assert (counts.right, counts.asked, counts.too_long) == (expected, 31, 0)
    assert 0 < expected < 31 and counts.chance == pytest.approx(31 / 3)


def test_processes_share_the_questions(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat(Weights(models["llama"]), load_preset(DEVICE="cpu"), CPU)
    rows = [*choices(13), {"question": "Why?", "answer": "No"}, choices(1)[0]]
    rows[-1]["question"] = "why " * 600
    path = write_rows(tmp_path / "q.jsonl", rows)
    questions = read_questions(config_of(path))[0][str(path)]
    whole = ask(chat, questions, ALONE, 4)
    assert (whole["choice"].asked, whole["choice"].too_long, whole["written"].asked) == (13, 1, 1)
    parts: list[torch.Tensor] = []

    def keep(values: torch.Tensor) -> torch.Tensor:
        parts.append(values)
        return values

    monkeypatch.setattr(chat_eval, "sum_over_ranks", keep)
    for rank in range(3):
        ask(chat, questions, dataclasses.replace(ALONE, rank=rank, size=3), 4)
    assert len(parts) == 3  # one all-reduce each
    choice, written = torch.stack(parts).sum(0).tolist()
    assert choice == pytest.approx(dataclasses.astuple(whole["choice"]))
    assert written == list(dataclasses.astuple(whole["written"]))


def test_a_fixed_part_is_asked_whatever_the_order_of_the_rows(tmp_path: Path) -> None:
    rows = choices(40)

    def asked(name: str, order: list[Any], **settings: str) -> set[str]:
        config = config_of(write_rows(tmp_path / name, order), **settings).replace(eval_examples=9)
        (questions,) = read_questions(config)[0].values()
        return {question.messages[0]["content"] for question in questions}

    first = asked("x.jsonl", rows)
    assert len(first) == 9 and asked("y.jsonl", rows[::-1]) == first
    assert asked("x.jsonl", rows, SEED="4") != first


@pytest.mark.parametrize(
    ("written", "answer", "same"),
    [
        ("Nine", "nine.", True),
        (" the  cat\n", "The cat", True),
        ("nine!", "Nine", True),
        ("nine nine", "nine", False),
        ("", "nine", False),
        ("29", "2 9", False),
    ],
)
def test_written_answers_are_compared_but_for_case_blanks_and_stops(
    written: str, answer: str, same: bool
) -> None:
    assert is_same(written, answer) == same


def test_the_last_reply_of_a_conversation_is_asked_for(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "q.jsonl", [row("One?", "Yes.", "Two?", "No.")])
    ((question,),) = read_questions(config_of(path))[0].values()
    said = [message["content"] for message in question.messages]
    assert said == ["One?", "Yes.", "Two?", "No."]


def test_each_source_is_counted_and_the_commonest_answer_is_a_guess(
    models: dict[str, Path], tmp_path: Path
) -> None:
    chat = Chat(Weights(models["llama"]), load_preset(DEVICE="cpu"), CPU)
    said = [row(f"Is it {i}?", "Yes." if i % 3 else "no") for i in range(9)]
    paths = [write_rows(tmp_path / "a.jsonl", said), write_rows(tmp_path / "b.jsonl", choices(4))]
    config = config_of(paths[0]).replace(eval_data=f"{paths[0]},{paths[1]}*2", micro_batch_size=4)
    read, facts = read_questions(config)
    assert {source: len(questions) for source, questions in read.items()} == {
        str(paths[0]): 9,
        str(paths[1]): 4,
    }
    assert facts["rows"] == 13
    counts = {source: ask(chat, questions, ALONE, 4) for source, questions in read.items()}
    assert score(counts[str(paths[0])]["written"])["chance"] == pytest.approx(6 / 9)
    for kind, asked in (("written", 9), ("choice", 4)):
        total = chat_eval.add(counts, kind)
        assert total.asked == asked
        assert total.right == sum(of_source[kind].right for of_source in counts.values())


def test_make_eval_writes_what_it_found(models: dict[str, Path], tmp_path: Path) -> None:
    rows = [*choices(9), {"question": "Why?", "answer": "It is so."}]
    env = environment(tmp_path, {}, MAKE_TARGET="eval", INIT_FROM=models["gemma2"])
    env |= {"EVAL_DATA": str(write_rows(tmp_path / "q.jsonl", rows)), "EVAL_EXAMPLES": "0"}
    env |= {"DATA_DIR": str(tmp_path / "data")}
    for name in ("VOCAB_SIZE", "N_LAYER", "N_HEAD", "N_EMBD"):
        env.pop(name)
    said = train(env, command=["scripts/launch.sh", "finetune.evaluate"])
    facts = json.loads((tmp_path / "run" / "eval" / "chat_init_gemma2.json").read_text())
    assert facts["step"] is None  # of a folder; the model card takes what has its step
    assert facts["rows"] == 10 and facts["choice"]["asked"] == 9
    assert facts["choice"]["chance"] == pytest.approx(1 / 3)
    assert facts["written"]["asked"] == 1 and len(facts["written"]["stop_interval"]) == 2
    assert facts["by_source"] == {
        env["EVAL_DATA"]: {"choice": facts["choice"], "written": facts["written"]}
    }
    assert f"of 9, guessing {1 / 3:.1%}" in said and "ended with <|im_end|>: " in said
    env["EVAL_DATA"] = str(write_rows(tmp_path / "q.jsonl", [row("why " * 600, "No.")]))
    said = train(env, command=["scripts/launch.sh", "finetune.evaluate"], code=78)
    assert "None of its 1 questions fits into the model's context of 512 tokens" in said


def test_questions_as_medqa_has_them() -> None:
    found = sorted((SHARED / "medical").glob("medqa*.jsonl"))
    if not found:
        pytest.skip("no MedQA rows beside the repository (shared/data/medical)")
    rows = [json.loads(line) for line in found[0].read_text(encoding="utf-8").splitlines()]
    config = load_preset(EVAL_DATA=str(found[0]), EVAL_EXAMPLES="0")
    read, facts = read_questions(config)
    (questions,) = read.values()
    assert facts["rows"] == len(rows)
    by_question = {entry["question"]: entry for entry in rows}
    for question in questions:
        entry = by_question[question.messages[0]["content"].rpartition("\nA. ")[0]]
        right = f"{entry['answer_idx']}. {entry['options'][entry['answer_idx']]}"
        assert question.messages[-1]["content"] == right
        assert len(question.options) == 4


def test_a_row_that_ends_with_a_tool_call_is_not_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    function = {"name": "look_up", "arguments": {"word": "so"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    asked = {"role": "user", "content": "Is it so?"}
    rows = [row("Why?", "I know."), {"messages": [asked, call]}]
    read, facts = read_questions(config_of(write_rows(tmp_path / "q.jsonl", rows)))
    (questions,) = read.values()
    assert len(questions) == 1 and facts["rows"] == 2
    assert "1 rows end with a tool call and are not asked" in caplog.text


def test_no_question_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="1 of 1 rows had to be dropped"):
        read_questions(config_of(write_rows(tmp_path / "q.jsonl", [{"question": "none"}])))


def test_results_of_a_run_have_its_step(tmp_path: Path) -> None:
    """By which the model card of the next export finds them."""
    place.write_facts(tmp_path, {"run": "run", "step": 3})
    config = load_preset(RUNS_DIR=str(tmp_path), RUN_NAME="run")
    chat_eval.write(config, ALONE, Weights(tmp_path, {"MODEL": "tiny"}), "chat", {"rows": 2})
    path = tmp_path / "run" / "eval" / "chat_step_0000003.json"
    assert json.loads(path.read_text())["step"] == 3
