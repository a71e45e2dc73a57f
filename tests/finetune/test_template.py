"""finetune/template.py: ids are those of the chat template; scored is what an assistant would generate."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from finetune import template
from finetune.row_shapes import Unlearned
from finetune.template import Labelled, Own, Theirs
from tests.finetune import making
from tests.finetune.making import (
    ASKS_FOR_THOUGHT,
    BRACKETS,
    CHATML,
    CUTS_THOUGHT,
    ENDLESS,
    MARKED,
    MARKED_SHORT,
    MARKED_TIGHT,
    THINKS,
    talk,
    their_tokenizer,
    theirs,
)
from train.data import tokenizer
from train.data.sources.formats import Bad
from train.data.tokenizer import TokenizerError, Vocabulary
from train.generate import chat_format
from train.generate.chat_format import Message

TALKS = [
    talk("2+2?", "4"),
    talk("Why?", "\n\n\u00e9t\u00e9 \U0001f642 so. ", " a\n", "I know", system=" Be brief. "),
    talk("a [INST] b", "<think>x</think> it's {{ x }} \\n"),
    talk(*["abc", "def"] * 6),
]


def only(made: list[Labelled | Bad]) -> Labelled:
    (one,) = made
    assert isinstance(one, Labelled), one
    return one


def scored_parts(t: template.Template, made: Labelled) -> list[str]:
    """The text of each run of scored tokens, found token by token."""
    parts, before = [], False
    for token, is_scored in zip(made.ids.tolist(), made.scored.tolist(), strict=True):
        if is_scored:
            parts = [*parts, [token]] if not before else [*parts[:-1], [*parts[-1], token]]
        before = is_scored
    return [t.decode(part) for part in parts]


def mute(messages: list[Message], number: int) -> list[Message]:
    """The same conversation, whose message of that number is not learned from."""
    return [Unlearned(*m) if i == number else m for i, m in enumerate(messages)]


@pytest.mark.parametrize("text", [CHATML, MARKED, MARKED_SHORT])
def test_an_answer_that_is_not_learned_from_is_written_and_not_scored(text: str) -> None:
    t = theirs(text)
    messages = talk("a?", "one", "b?", "two", "c?", "three")
    all_scored = only(t.label([messages]))
    made = only(t.label([mute(messages, 3)]))
    assert made.ids.tolist() == all_scored.ids.tolist()
    assert scored_parts(t, made) == ["one<|im_end|>", "three<|im_end|>"]
    assert scored_parts(t, only(t.label([mute(messages[:2], 1)]))) == []


# ---- transformers' templates


@pytest.mark.parametrize(
    "text", [CHATML, MARKED, MARKED_SHORT, BRACKETS, THINKS, ENDLESS, CUTS_THOUGHT]
)
def test_ids_are_those_that_transformers_gives(text: str) -> None:
    t = theirs(text)
    talks = [messages for messages in TALKS if text != BRACKETS or messages[0].role != "system"]
    for messages, made in zip(talks, t.label(talks), strict=True):
        expected = their_tokenizer(text).apply_chat_template(
            template.theirs(messages), return_dict=False
        )
        assert isinstance(made, Labelled) and made.ids.tolist() == expected
        assert len(made.scored) == len(made.ids) and made.ids.dtype == np.uint16


@pytest.mark.parametrize("messages", TALKS, ids=range(len(TALKS)))
def test_prefixes_find_what_marks_of_the_template_say(messages: list[Message]) -> None:
    found = [
        only(theirs(text).label([messages]))
        for text in (CHATML, MARKED, MARKED_SHORT, making.MARKED_LOOSE)
    ]
    assert found[0].scored.sum() > 0
    for other in found[1:]:
        assert np.array_equal(found[0].ids, other.ids) and np.array_equal(
            found[0].scored, other.scored
        )


@pytest.mark.parametrize("text", [MARKED, MARKED_TIGHT])
def test_marks_are_what_transformers_makes_of_them(text: str) -> None:
    for messages in [
        TALKS[0],
        *TALKS[2:],
    ]:  # TALKS[1] has an answer that shares a token with its header
        expected = their_tokenizer(text).apply_chat_template(
            template.theirs(messages), return_dict=True, return_assistant_tokens_mask=True
        )
        assert only(theirs(text).label([messages])).scored.tolist() == [
            *map(bool, expected["assistant_masks"])
        ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (MARKED_TIGHT, ["one<|im_end|>", "two<|im_end|>"]),
        (making.MARKED_LAST, ["two<|im_end|>"]),
        (making.ENDS_TWICE, ["one<|im_end|>", "two<|im_end|>\n</s>"]),
        (CHATML, ["one<|im_end|>", "two<|im_end|>"]),
        (BRACKETS, [" one</s>", " two</s>"]),
        (THINKS, ["<think>\n\n</think>\n\ntwo<|im_end|>"]),
        (CUTS_THOUGHT, ["one</s>", "two</s>"]),
        (ENDLESS, ["one\n", "two\n"]),
    ],
    ids=[
        "tight",
        "marks the last",
        "ends twice",
        "ChatML",
        "brackets",
        "thinks",
        "cuts thought",
        "endless",
    ],
)
def test_scored_by_hand(text: str, parts: list[str]) -> None:
    t = theirs(text)
    made = only(t.label([talk("a?", "one", "b?", "two")]))
    assert scored_parts(t, made) == parts
    assert made.unscored == 2 - len(parts)


def test_what_a_template_does_is_said() -> None:
    assert theirs(CHATML).remarks == []
    assert theirs(MARKED).remarks == [] == theirs(making.MARKED_LOOSE).remarks
    (only_last,) = theirs(THINKS).remarks
    assert only_last.startswith("only the last answer of a conversation is scored")
    (endless,) = theirs(ENDLESS).remarks
    assert endless.startswith("the chat template ends an answer with '\\n' and no special token")
    (only_last,) = theirs(making.MARKED_LAST).remarks
    assert only_last.startswith("only the last answer")
    (one_turn,) = theirs(making.ONE_TURN).remarks
    assert (
        one_turn
        == "conversations of several answers are dropped, since the template says: one turn only"
    )
    (dated,) = theirs("{{ strftime_now('%d %b %Y') }}" + CHATML).remarks
    assert dated.startswith("the chat template writes the date")


def test_a_thought_that_the_template_cuts_out_is_counted() -> None:
    marks = (
        CUTS_THOUGHT.replace(
            "{{ m['content'].split('</think>')[-1] }}",
            "{% generation %}{{ m['content'].split('</think>')[-1] }}{% endgeneration %}",
            1,
        )
        .replace(
            "{% generation %}",
            "{% if m['role'] == 'user' %}{{ m['content'] }}{% else %}{% generation %}",
        )
        .replace("{% endgeneration %}", "{% endgeneration %}{% endif %}")
    )
    for text in (CUTS_THOUGHT, marks):
        t = theirs(text)
        made = only(t.label([talk("a?", "hm</think>one", "b?", "two")]))
        assert (scored_parts(t, made), made.altered, made.unscored) == (
            ["one</s>", "two</s>"],
            1,
            0,
        )


def test_a_template_whose_reply_begins_otherwise_is_refused_with_what_it_does() -> None:
    with pytest.raises(
        TokenizerError,
        match=r"a-model: its chat template cannot be learned from, since it asks for a "
        r"reply with '<think>\\n' where an answer that is there is written 'It is\.</s>'",
    ):
        theirs(ASKS_FOR_THOUGHT)


def test_a_template_that_marks_something_else_is_refused() -> None:
    wrong = MARKED.replace("m['role'] == 'assistant'", "m['role'] == 'user'")
    with pytest.raises(
        TokenizerError, match=r"marks 'Is it so\?<\|im_end\|>' as the answer where 'It is\.' is"
    ):
        theirs(wrong)
    nothing = MARKED.replace("m['role'] == 'assistant'", "false")
    with pytest.raises(TokenizerError, match=r"marks '' as the answer"):
        theirs(nothing)


def test_no_template_and_no_fast_tokenizer_are_refused() -> None:
    with pytest.raises(
        TokenizerError, match=r"a-model: its tokenizer has no chat template.*chat_template\.jinja"
    ):
        theirs(None)
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Theirs(type("Slow", (), {"is_fast": False})(), "a-model")


@pytest.mark.parametrize(
    "text",
    [
        BRACKETS,
        BRACKETS.replace(
            " {{ m['content'] | trim }}{{ eos_token }}",
            "{% generation %} {{ m['content'] | trim }}{{ eos_token }}{% endgeneration %}",
        ),
    ],
    ids=["prefixes", "marks"],
)
def test_what_the_template_refuses_is_dropped_in_its_words(text: str) -> None:
    t = theirs(text)
    assert t.has_marks == ("generation %}" in text)
    bad, good = t.label([talk("a?", "one", system="Be brief."), talk("a?", "one")])
    assert bad == Bad("template", "the template says: System role not supported")
    assert isinstance(good, Labelled)


@pytest.mark.parametrize("text", [CHATML, MARKED])
def test_a_message_that_spells_a_special_token_out_is_dropped_and_named(text: str) -> None:
    bad, good = theirs(text).label([talk("a?", "x <|im_end|> y"), talk("<think>", "<|im_end>")])
    assert bad == Bad("spells", "message 2 has '<|im_end|>'")
    assert isinstance(good, Labelled)


def test_a_token_that_reaches_from_the_header_into_the_answer_is_not_scored() -> None:
    """ "assistant\\n" and an answer that begins with a line end share a token; a reply cannot begin inside of it."""
    assert len(Tokenizer.from_str(making.backend()).encode("\n\n").ids) == 1
    for text in (CHATML, MARKED):
        t = theirs(text)
        assert scored_parts(t, only(t.label([talk("a?", "\none")]))) == ["one<|im_end|>"]


# ---- Our own format


@pytest.fixture(scope="module", params=["own", "chatml"])
def own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = tmp_path_factory.mktemp("own") / "tokenizer.json"
    v = tokenizer.train((f"user system word{i} " * 5 for i in range(400)), 512, path)
    if request.param == "own":
        return v
    path.write_text(
        v.tokenizer.to_str()
        .replace('"<|system|>"', '"<|im_start|>"')
        .replace('"<|end|>"', '"<|im_end|>"')
    )
    return tokenizer.load(path)


@pytest.mark.parametrize("messages", TALKS, ids=range(len(TALKS)))
def test_own_ids_are_those_of_a_chat_and_scored_those_of_replies(
    own: Vocabulary, messages: list[Message]
) -> None:
    t = Own(own, "a-run")
    made = only(t.label([messages]))
    assert made.ids.tolist() == chat_format.render(own, messages, reply=False)
    expected = []  # what comes behind a rendered prefix, up to the end of the message
    for i, message in enumerate(messages):
        if message.role == "assistant":
            begin = len(chat_format.render(own, messages[:i]))
            expected.append(
                made.ids.tolist()[begin:].index(chat_format.end_of_message(own)) + begin
            )
    ends = np.flatnonzero(made.scored & (made.ids == chat_format.end_of_message(own)))
    assert ends.tolist() == expected
    answers = [
        part.removesuffix(own.decode([chat_format.end_of_message(own)]))
        for part in scored_parts(t, made)
    ]
    for part, text in zip(
        answers, [m.text for m in messages if m.role == "assistant"], strict=True
    ):
        assert part == text or (t.format is chat_format.CHATML and part == text.lstrip("\n"))


def test_own_text_stays_text(own: Vocabulary) -> None:
    t = Own(own, "a-run")
    end = own.decode([chat_format.end_of_message(own)])
    made = only(t.label([talk(f"a {end}", f"b {end} c")]))
    assert scored_parts(t, made) == [f"b {end} c{end}"]
    assert (made.ids == chat_format.end_of_message(own)).sum() == 2


# ---- A model's folder


def test_the_template_of_a_folder(tmp_path: Path) -> None:
    their_tokenizer(CHATML).save_pretrained(tmp_path / "theirs")
    found = template.find(tmp_path / "theirs", "m")
    assert isinstance(found, Theirs) and found.fingerprint == theirs(CHATML).fingerprint
    v = tokenizer.train(
        (f"word{i} " * 5 for i in range(400)), 512, tmp_path / "ours" / "tokenizer.json"
    )
    ours = template.find(tmp_path / "ours")
    assert isinstance(ours, Own) and ours.vocabulary.sha256 == v.sha256
    (tmp_path / "none").mkdir()
    with pytest.raises(
        TokenizerError, match=r"MODEL=m: there is no tokenizer_config\.json and no tokenizer\.json"
    ):
        template.find(tmp_path / "none", "m")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match="transformers cannot read its tokenizer"):
        template.find(tmp_path / "broken")


def test_what_decides_the_labels_is_in_the_fingerprint() -> None:
    other = Tokenizer.from_str(making.backend())
    other.add_tokens(["xyz"])
    prints = {
        theirs(CHATML).fingerprint,
        theirs(THINKS).fingerprint,
        Theirs(their_tokenizer(CHATML, other.to_str()), "a-model").fingerprint,
    }
    assert (
        len(prints) == 3 and Theirs(their_tokenizer(CHATML), "another name").fingerprint in prints
    )
