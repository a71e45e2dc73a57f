"""One example as text, as the model is trained on it, with masked and scored parts made visible.

    on a terminal   masked parts are dim, scored ones bold and green
    in plain text   [[[scored parts stand between these]]]

Characters that would move a terminal's cursor or change its colours are shown as their escapes. A part that is longer
than LONGEST characters is shown by its beginning and its end.
"""

import itertools
import re
from collections.abc import Callable, Sequence

import numpy as np

from record import number_formats
from train.model.loss import IGNORED

LONGEST = 1200
DIM, SCORED, PLAIN = "\x1b[2m", "\x1b[1;32m", "\x1b[0m"
OPEN, CLOSE = "[[[", "]]]"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def preview(
    tokens: np.ndarray,
    targets: np.ndarray,
    decode: Callable[[Sequence[int]], str],
    place: str,
    colour: bool = False,
) -> str:
    """The text of an example, under a line that says what it is.

    tokens, targets (n,) int64 as in a window; the last target is scored, since examples end there. decode: ids to
    text; place: where the example comes from.
    """
    ids, scored = np.append(tokens, targets[-1]), np.append(False, targets != IGNORED)
    marks = (
        "masked parts dim, scored ones bold" if colour else f"scored parts stand in {OPEN} {CLOSE}"
    )
    token_count = number_formats.count(len(ids))
    scored_count = number_formats.count(scored.sum())
    head = f"one example, {place}: {token_count} tokens, {scored_count} of them scored ({marks})"
    parts = []
    for begin, end, is_scored in runs(scored):
        text = shortened(
            CONTROL.sub(lambda found: repr(found[0])[1:-1], text_of(ids, begin, end, decode))
        )
        if colour:
            parts.append(f"{SCORED if is_scored else DIM}{text}{PLAIN}")
        else:
            parts.append(f"{OPEN}{text}{CLOSE}" if is_scored else text)
    return f"{head}\n{''.join(parts)}"


def runs(scored: np.ndarray) -> list[tuple[int, int, bool]]:
    """(begin, end, whether it is scored) of each run of equal marks."""
    borders = [0, *(np.flatnonzero(scored[1:] != scored[:-1]) + 1).tolist(), len(scored)]
    return [(begin, end, bool(scored[begin])) for begin, end in itertools.pairwise(borders)]


def text_of(ids: np.ndarray, begin: int, end: int, decode: Callable[[Sequence[int]], str]) -> str:
    """The text of a run, blanks at its start included: some tokenizers leave them out where a text begins."""
    whole, before = decode(ids[:end].tolist()), decode(ids[:begin].tolist())
    return whole[len(before) :] if whole.startswith(before) else decode(ids[begin:end].tolist())


def shortened(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    left = len(text) - LONGEST
    return f"{text[: LONGEST // 2]} ... ({left:,} characters) ... {text[-LONGEST // 2 :]}"
