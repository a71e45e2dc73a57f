"""finetune/preview.py: an example as text, its scored parts made visible."""

import numpy as np

from finetune.preview import CLOSE, DIM, LONGEST, OPEN, PLAIN, SCORED, preview
from finetune.template import Labelled
from tests.finetune.making import CHATML, talk, theirs
from train.model.loss import IGNORED


def shown(*texts: str, colour: bool = False) -> str:
    t = theirs(CHATML)
    (made,) = t.label([talk(*texts)])
    assert isinstance(made, Labelled)
    ids, scored = made.ids[:-1].astype(np.int64), made.scored[:-1]  # up to the last scored one
    return preview(ids[:-1], np.where(scored[1:], ids[1:], IGNORED), t.decode, "x.jsonl:7", colour)


def test_plain_text_by_hand() -> None:
    head, text = shown("a?", "one", "b?", "it is").split("\n", 1)
    assert head.startswith("one example, x.jsonl:7: ") and head.endswith(
        "(scored parts stand in [[[ ]]])"
    )
    assert text == (
        "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n[[[one<|im_end|>]]]\n<|im_start|>user\nb?"
        "<|im_end|>\n<|im_start|>assistant\n[[[it is<|im_end|>]]]"
    )


def test_the_numbers_of_the_head_are_those_of_the_tokens() -> None:
    t = theirs(CHATML)
    (made,) = t.label([talk("a?", "one")])
    assert isinstance(made, Labelled)
    assert f": {len(made.ids) - 1} tokens, {made.scored.sum()} of them scored (" in shown(
        "a?", "one"
    )


def test_on_a_terminal_the_same_text_stands_in_colours() -> None:
    plain, coloured = (
        shown("a?", "one", "b?", "two", colour=colour).split("\n", 1)[1] for colour in (False, True)
    )
    assert coloured.replace(DIM, "").replace(SCORED, OPEN).replace(OPEN, "").replace(
        PLAIN, ""
    ) == plain.replace(OPEN, "").replace(CLOSE, "")
    assert coloured.count(SCORED) == plain.count(OPEN) == 2
    assert f"{SCORED}one<|im_end|>{PLAIN}{DIM}\n" in coloured and coloured.endswith(PLAIN)


def test_characters_that_move_a_terminal_are_shown_as_escapes() -> None:
    text = shown("a\x1b[2Jb\r\u202ec", "d\x07\te\x9b")
    assert "a\\x1b[2Jb\\r\\u202ec" in text and "d\\x07\te\\x9b" in text


def test_long_parts_are_shown_by_both_ends() -> None:
    text = shown("a" * 5000 + "Z", "b" * 5000 + "Y")
    assert len(text) < 4 * LONGEST
    assert (
        "aaZ<|im_end|>" in text
        and "[[[bbb" in text
        and "bbY<|im_end|>]]]" in text
        and "characters) ..." in text
    )
