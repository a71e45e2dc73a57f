"""One example as text, as the model is trained on it, with its scored parts marked.

    on a terminal   masked parts are dim, scored ones bold and green
    in plain text   [[[scored parts are between these]]]

Characters that would move a terminal's cursor or change its colors are shown as escapes. A part of
more than LONGEST characters is shown by its beginning and its end.
"""

import itertools
import re
from collections.abc import Callable, Sequence

import numpy as np

from record import number_formats

LONGEST = 1200
DIM = "\x1b[2m"
SCORED = "\x1b[1;32m"
PLAIN = "\x1b[0m"
OPEN, CLOSE = "[[[", "]]]"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def preview(
    ids: np.ndarray,
    scored: np.ndarray,
    decode: Callable[[Sequence[int]], str],
    place: str,
    color: bool = False,
) -> str:
    """Return the text of an example, under a line that says what it is.

    Args:
        ids, scored: (n,) of the example.
        place: where it comes from.
    """
    marks = "masked parts dim, scored ones bold" if color else f"scored parts are in {OPEN} {CLOSE}"
    tokens = number_formats.count(len(ids))
    lines = f"one example, {place}: {tokens} tokens, {scored.sum()} of them scored ({marks})\n"
    borders = [0, *(np.flatnonzero(scored[1:] != scored[:-1]) + 1).tolist(), len(ids)]
    for begin, end in itertools.pairwise(borders):
        text = text_between(ids.tolist(), begin, end, decode)
        text = clean(text)
        if color:
            text = f"{SCORED if scored[begin] else DIM}{text}{PLAIN}"
        elif scored[begin]:
            text = f"{OPEN}{text}{CLOSE}"
        lines += text
    return lines


def text_between(
    ids: list[int], begin: int, end: int, decode: Callable[[Sequence[int]], str]
) -> str:
    """Return a part's text with blanks at its start, which some tokenizers leave out there."""
    before = decode(ids[:begin])
    text = decode(ids[:end])
    if text.startswith(before):
        return text[len(before) :]
    return decode(ids[begin:end])


def clean(text: str) -> str:
    """Return a text that a terminal can show: control characters as escapes, and only its ends if it is long."""
    text = CONTROL.sub(lambda match: repr(match[0])[1:-1], text)
    left_out = len(text) - LONGEST
    if left_out <= 0:
        return text
    return f"{text[: LONGEST // 2]} ... ({left_out:,} characters) ... {text[-LONGEST // 2 :]}"
