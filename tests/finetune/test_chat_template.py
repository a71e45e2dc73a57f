"""finetune/chat_template.py: ids are those of transformers; scored is what the assistant generates."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from finetune import limits
from finetune.chat_template import ChatTemplate, Labelled, read_tokenizer
from finetune.row_shapes import Conversation
from tests.extra_packages import install_apart
from tests.finetune import making
from tests.finetune.making import (
    ASKS_FOR_THOUGHT,
    BRACKETS,
    CHATML,
    CUTS_THOUGHT,
    ENDLESS,
    ENDS_TWICE,
    MARKED,
    MARKED_LAST,
    MARKED_LOOSE,
    MARKED_SHORT,
    MARKED_TIGHT,
    ONE_TURN,
    THINKS,
    their_tokenizer,
)
from train.data.sources.formats import Bad
from train.data.tokenizer import TokenizerError

# As in GLM: only the header of the next message ends a reply.
OPEN_ENDED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As in gpt-oss: the last reply ends with another token than those before it.
LAST_ENDS_OTHERWISE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if loop.last and m['role'] == 'assistant' %}</s>{% else %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thoughts of the last reply are written, those of earlier ones are not.
WITH_THOUGHTS = THINKS.replace(
    "<think>\n\n</think>\n\n", "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
)

CALL = {"type": "function", "function": {"name": "find", "arguments": {"word": "so"}}}
WITH_CALLS = (
    "{{ m['content'] }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }} {{ call.function.arguments.word }}{% endfor %}"
)


def talk(*texts: str, system: str = "", unlearned: tuple[int, ...] = ()) -> Conversation:
    """User and assistant in turn."""
    messages = [{"role": "system", "content": system}] if system else []
    for number, text in enumerate(texts):
        messages.append({"role": ("user", "assistant")[number % 2], "content": text})
    return Conversation(messages, None, frozenset(unlearned))


@pytest.fixture
def template(tmp_path: Path) -> Any:
    def make(text: str | None, **options: Any) -> ChatTemplate:
        their_tokenizer(text).save_pretrained(str(tmp_path))
        return ChatTemplate(tmp_path, name="a-model", **options)

    return make


def scored_parts(chat: ChatTemplate, example: Labelled) -> list[str]:
    """The text of each run of scored tokens."""
    parts: list[list[int]] = []
    before = False
    for token, is_scored in zip(example.ids.tolist(), example.scored.tolist(), strict=True):
        if is_scored and not before:
            parts.append([])
        if is_scored:
            parts[-1].append(token)
        before = is_scored
    return [chat.decode(part) for part in parts]


def all_parts(chat: ChatTemplate, conversation: Conversation) -> list[list[str]]:
    (made,) = chat.label([conversation])
    assert isinstance(made, list), made
    return [scored_parts(chat, example) for example in made]


TWO_REPLIES = {
    "ChatML": (CHATML, "<|im_end|>", [["one<|im_end|>", "two<|im_end|>"]]),
    "brackets": (BRACKETS, "</s>", [[" one</s>", " two</s>"]]),
    "ends twice": (ENDS_TWICE, "<|im_end|>", [["one<|im_end|>", "two<|im_end|>"]]),
    "open-ended": (OPEN_ENDED, "<|user|>", [["one<|user|>", "two<|user|>"]]),
    "rewrites the end": (LAST_ENDS_OTHERWISE, "</s>", [["one</s>"], ["two</s>"]]),
    "rewrites the reply": (
        THINKS,
        "<|im_end|>",
        [["<think>\n\n</think>\n\none<|im_end|>"], ["<think>\n\n</think>\n\ntwo<|im_end|>"]],
    ),
    "marks": (MARKED, "<|im_end|>", [["one<|im_end|>", "two<|im_end|>"]]),
    "marks without the end": (MARKED_SHORT, "<|im_end|>", [["one<|im_end|>", "two<|im_end|>"]]),
    "marks and a blank": (MARKED_LOOSE, "<|im_end|>", [["one<|im_end|>", "two<|im_end|>"]]),
    "marks side by side": (MARKED_TIGHT, "<|im_end|>", [["one<|im_end|>", "two<|im_end|>"]]),
    "marks the last": (MARKED_LAST, "<|im_end|>", [["one<|im_end|>", "two<|im_end|>"]]),
    "cuts thoughts": (CUTS_THOUGHT, "</s>", [["one</s>", "two</s>"]]),
}


@pytest.mark.parametrize("name", TWO_REPLIES)
def test_each_reply_and_the_token_that_ends_it_are_scored(name: str, template: Any) -> None:
    text, stop_token, expected = TWO_REPLIES[name]
    chat = template(text)
    assert all_parts(chat, talk("a?", "one", "b?", "two")) == expected
    assert chat.stop_token == stop_token
    assert chat.stop_ids == [chat.tokenizer.convert_tokens_to_ids(stop_token)]


@pytest.mark.parametrize("name", TWO_REPLIES)
def test_an_example_is_the_prompt_and_then_the_reply(name: str, template: Any) -> None:
    """What is learned is exactly what a chat asks for and reads."""
    chat = template(TWO_REPLIES[name][0])
    conversation = talk("a?", "one", "b?", "two")
    (made,) = chat.label([conversation])
    last = made[-1]
    prompt = chat.prompt_ids(conversation.messages[:3])
    assert last.ids[: len(prompt)].tolist() == prompt
    reply = last.ids[len(prompt) :][last.scored[len(prompt) :]].tolist()
    assert reply[-1] in chat.stop_ids
    assert chat.read_reply(reply) == "two"
    assert chat.read_reply([*reply, *prompt]) == "two"


@pytest.mark.parametrize("text", [CHATML, MARKED, BRACKETS, THINKS, CUTS_THOUGHT, OPEN_ENDED])
def test_ids_are_those_that_transformers_gives(text: str, template: Any) -> None:
    chat = template(text)
    talks = [
        talk("2+2?", "4"),
        talk("Why?", "\n\n\u00e9t\u00e9 \U0001f642 so. "),
        talk("a [INST] b", "<think>x</think> it's {{ x }} \\n"),
    ]
    for conversation, made in zip(talks, chat.label(talks), strict=True):
        expected = their_tokenizer(text).apply_chat_template(
            conversation.messages, return_dict=False
        )
        (example,) = made
        assert example.ids.dtype == np.uint16 and len(example.scored) == len(example.ids)
        assert example.ids.tolist()[: len(expected)] == expected
        assert example.ids.tolist()[len(expected) :] in ([], [chat.stop_ids[0]])


def test_a_reply_that_is_not_learned_is_read_and_not_scored(template: Any) -> None:
    for text in (CHATML, MARKED):
        parts = all_parts(
            template(text), talk("a?", "one", "b?", "two", "c?", "three", unlearned=(3,))
        )
        assert parts == [["one<|im_end|>", "three<|im_end|>"]]
    assert all_parts(template(CHATML), talk("a?", "one", unlearned=(1,))) == []


def test_thoughts_are_written_or_the_conversation_is_dropped(template: Any) -> None:
    conversation = talk("a?", "one")
    conversation.messages[1]["reasoning_content"] = "hm"
    chat = template(WITH_THOUGHTS)
    assert all_parts(chat, conversation) == [["<think>\nhm\n</think>\n\none<|im_end|>"]]
    ids = chat.tokenizer("<think>\nhm 2\n</think>\n\none<|im_end|>")["input_ids"]
    assert chat.read_reply(ids) == "one"
    (dropped,) = template(CHATML).label([conversation])
    assert dropped.reason == "thoughts"


def test_tool_calls_are_written_or_the_conversation_is_dropped(template: Any) -> None:
    conversation = talk("a?", "")
    conversation.messages[1]["tool_calls"] = [CALL]
    with_calls = CHATML.replace("{{ m['content'] }}", WITH_CALLS)
    assert all_parts(template(with_calls), conversation) == [["find so<|im_end|>"]]
    (dropped,) = template(CHATML).label([conversation])
    assert dropped.reason == "tools"


def test_a_thought_that_the_template_cuts_out_is_counted(template: Any) -> None:
    (made,) = template(CUTS_THOUGHT).label([talk("a?", "hm</think>one", "b?", "two")])
    assert made[0].altered == 1


def test_a_template_without_an_end_needs_a_stop_token(template: Any) -> None:
    with pytest.raises(TokenizerError, match=r"a-model: .*STOP_TOKEN=</s>"):
        template(ENDLESS)
    chat = template(ENDLESS, stop_token="<|im_end|>")
    assert all_parts(chat, talk("a?", "one", "b?", "two")) == [["one<|im_end|>"], ["two<|im_end|>"]]
    with pytest.raises(TokenizerError, match=r"STOP_TOKEN=nil: .*Choose one of: .*<\|im_end\|>"):
        template(ENDLESS, stop_token="nil")
    for ending in ("<|im_end|>", "<end>"):  # a special token, and text in a model without one
        chat = template(CHATML.replace("<|im_end|>", ending), stop_token="</s>")
        assert all_parts(chat, talk("a?", "one", "b?", "two")) == [["one</s>"], ["two</s>"]]


def test_a_call_ends_with_the_header_of_its_result(template: Any) -> None:
    text = OPEN_ENDED.replace("{{ m['content'] }}", WITH_CALLS).replace(
        "<|{{ m['role'] }}|>",
        ("{{ '<|im_start|>' if m['role'] == 'tool' else '<|' + m['role'] + '|>' }}"),
    )
    conversation = talk("a?", "", "thus", "one")
    conversation.messages[1]["tool_calls"] = [CALL]
    conversation.messages[2] = {"role": "tool", "content": "thus"}
    chat = template(text)
    assert all_parts(chat, conversation) == [["find so<|im_start|>", "one<|user|>"]]
    assert chat.decode(chat.stop_ids) == "<|im_start|><|user|>"


def test_a_prompt_that_ends_with_a_space_is_named(template: Any) -> None:
    (remark,) = template(ENDLESS, stop_token="</s>").remarks
    assert "The chat template ends a prompt with a space" in remark


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ASKS_FOR_THOUGHT, r"asks for a reply with '<think>\\n' and writes one as 'It is\.</s>'"),
        (MARKED.replace("== 'assistant'", "== 'user'"), r"marks leave this reply out"),
        (MARKED.replace("m['role'] == 'assistant'", "false"), r"marks leave this reply out"),
        ("{{ raise_exception('no chats') }}", r"it says: no chats"),
        (None, r"has no chat template.*chat_template\.jinja"),
    ],
)
def test_a_template_that_nothing_can_be_learned_from_is_refused(
    text: str | None, words: str, template: Any
) -> None:
    with pytest.raises(TokenizerError, match=f"a-model: .*{words}"):
        template(text)


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
        "{% macro two(n) %}{% if n %}{{ two(n-1) }}{{ two(n-1) }}{% endif %}{% endmacro %}{{ two(60) }}",
        "{{ 9 ** (9**9) }}",
        "{{ 'a' * 2**31 }}",
        "{% generation %}{{ 'a' * 2**31 }}{% endgeneration %}",
    ],
)
def test_a_template_that_does_not_end_is_refused(
    text: str, template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CPU_S", 1)
    with pytest.raises(
        TokenizerError, match=r"chat_template\.jinja: .* took more than 5 s or 1 GiB"
    ):
        template(CHATML + text)


def test_a_template_that_does_not_end_on_a_long_message_drops_it(
    template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CALL_CPU_S", 0.2)
    endless = "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2
    late = f"{{% if messages[0]['content']|length > 70 %}}{endless}{{% endif %}}"
    bad, good = template(CHATML + late).label([talk("a?" * 40, "one"), talk("a?", "one")])
    assert bad == Bad("template", "it says: it takes more than 0.2 s")
    assert isinstance(good, list)


def test_a_sparse_file_of_a_tokenizer_is_not_read(template: Any, tmp_path: Path) -> None:
    template(CHATML)
    with open(tmp_path / "chat_template.jinja", "ab") as file:
        file.truncate(2**31)
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: is larger than 256 MiB"):
        read_tokenizer(tmp_path)


def test_what_a_template_refuses_is_dropped_in_its_words(template: Any) -> None:
    bad, good = template(BRACKETS).label([talk("a?", "one", system="Be brief."), talk("a?", "one")])
    assert bad == Bad("template", "it says: System role not supported")
    assert isinstance(good, list)
    (bad,) = template(ONE_TURN).label([talk("a?", "one", "b?", "two")])
    assert bad == Bad("template", "it says: one turn only")


def test_a_message_that_spells_a_special_token_is_dropped_and_named(template: Any) -> None:
    bad, good = template(CHATML).label([talk("a?", "x <|im_end|> y"), talk("<think>", "<|im_end>")])
    assert bad == Bad("spells", "message 2 contains <|im_end|>")
    assert isinstance(good, list)


def test_a_token_that_reaches_from_the_header_into_the_reply_is_not_scored(template: Any) -> None:
    assert len(Tokenizer.from_str(making.backend()).encode("\n\n").ids) == 1
    for text in (CHATML, MARKED):
        assert all_parts(template(text), talk("a?", "\none")) == [["one<|im_end|>"]]


def test_a_folder_without_a_tokenizer_of_transformers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer_config\.json"):
        ChatTemplate(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match="transformers cannot read its tokenizer"):
        ChatTemplate(tmp_path)


def test_what_decides_the_labels_is_in_the_fingerprint(template: Any) -> None:
    made = [
        template(CHATML),
        template(THINKS),
        template(CHATML, stop_token="</s>"),
        template("{{ strftime_now('%d %b %Y') }}" + CHATML),
    ]
    assert len({chat.fingerprint for chat in made}) == 4
    assert template(CHATML).fingerprint == made[0].fingerprint
    assert [len(chat.remarks) for chat in made] == [0, 0, 0, 1]


# What TRL's published templates end a reply with. They are an oracle of what models in use do.
PUBLISHED = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "cohere2": "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "gemma4": "<turn|>",
    "glm4moe": "<|user|>",
    "gptoss": "<|return|>",
    "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "nemotron_3_nano_training": "<|im_end|>",
    "phi3": "<|end|>",
    "phi3_training": "<|end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>",
    "qwen3_training": "<|im_end|>",
}


@pytest.fixture(scope="module")
def published() -> Path:
    folder = install_apart("trl", ["trl==1.16.0"], lambda folder: ["--target", str(folder)])
    return folder / "trl" / "chat_templates"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates(name: str, published: Path, tmp_path: Path) -> None:
    text = (published / f"{name}.jinja").read_text()
    ending = PUBLISHED[name]
    backend = Tokenizer.from_str(making.backend())
    tokens = set(ending.replace("><", "> <").split(" "))
    tokens |= {"<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|im_start|>", "<|call|>"}
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in sorted(tokens)]
    )
    their_tokenizer(text, backend.to_str()).save_pretrained(str(tmp_path))
    chat = ChatTemplate(tmp_path)
    assert chat.endings[0] == ending
    parts = all_parts(chat, talk("a?", "one", "b?", "two"))
    replies = [part for example in parts for part in example]
    for reply, said in zip(replies, ("one", "two"), strict=True):
        assert reply.endswith(said + ending)
        ids = chat.tokenizer(reply, add_special_tokens=False)["input_ids"]
        assert chat.read_reply(ids) == said
