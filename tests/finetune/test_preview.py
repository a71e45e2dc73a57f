"""finetune/preview.py: an example as text, its scored parts marked."""

from finetune.preview import CLOSE, DIM, LONGEST, OPEN, PLAIN, SCORED, preview
from finetune.row_shapes import Conversation
from tests.finetune.making import CHATML, chat_template, talk


def show(*texts: str, color: bool = False) -> str:
    template = chat_template(CHATML)
    (made,) = template.label([Conversation(talk(*texts))])
    assert isinstance(made, list)
    ids, scored, _ = made[0]
    return preview(ids[:-1], scored[:-1], template.decode, "x.jsonl:7", color)


def test_plain_text_by_hand() -> None:
    assert show("a?", "one", "b?", "it is") == (
        "one example, x.jsonl:7: 32 tokens, 7 of them scored (scored parts are in [[[ ]]])\n"
        "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n[[[one<|im_end|>]]]\n<|im_start|>user"
        "\nb?<|im_end|>\n<|im_start|>assistant\n[[[it is<|im_end|>]]]"
    )


def test_a_terminal_shows_the_same_text_in_colors() -> None:
    plain = show("a?", "one", "b?", "two").split("\n", 1)[1]
    colored = show("a?", "one", "b?", "two", color=True).split("\n", 1)[1]
    without = colored.replace(DIM, "").replace(SCORED, "").replace(PLAIN, "")
    assert without == plain.replace(OPEN, "").replace(CLOSE, "")
    assert colored.count(SCORED) == plain.count(OPEN) == 2
    assert f"{SCORED}one<|im_end|>{PLAIN}{DIM}\n" in colored and colored.endswith(PLAIN)


def test_characters_that_move_a_terminal_are_shown_as_escapes() -> None:
    text = show("a\x1b[2Jb\r\u202ec", "d\x07\te\x9b")
    assert "a\\x1b[2Jb\\r\\u202ec" in text and "d\\x07\te\\x9b" in text


def test_long_parts_are_shown_by_both_ends() -> None:
    text = show("a" * 5000 + "Z", "b" * 5000 + "Y")
    assert len(text) < 4 * LONGEST and "characters) ..." in text
    assert all(part in text for part in ("aaZ<|im_end|>", "[[[bbb", "bbY<|im_end|>]]]"))
