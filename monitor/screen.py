"""What is seen as one screen of a terminal, of 80 x 24 characters and more: what is wrong first, then the run.

A screen is a list of lines. Each block has several ways to be told, the fullest first: where the terminal is low the
least important block gives way, until all of it fits. Colours only underline what words and figures say; they are the
terminal's own, so that dark and light ones show them.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from monitor import panels
from monitor.facts import Fault, Seen
from monitor.panels import Style
from monitor.phrases import CONTROLS
from monitor.snapshot import SURROGATES

WIDE = 160  # columns from which on the run and its devices stand side by side
GAP = 3


@dataclasses.dataclass
class Block:
    """ways: the lines of each way to tell it, the fullest first; none of what there is nothing to tell."""

    ways: list[list[Text]]
    chosen: int = 0

    @property
    def lines(self) -> list[Text]:
        return self.ways[self.chosen] if self.ways else []


@dataclasses.dataclass(frozen=True)
class Screen:
    """For rich: it asks anew at each drawing, and so with the size that the terminal has then."""

    seen: Seen
    faults: Sequence[Fault]
    verdict: str = ""
    trouble: str = ""  # why the last look brought nothing
    remarks: Sequence[str] = ()  # on ALERT_CMD
    fills: bool = True  # it must not be higher than the terminal

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        style = Style(options.max_width, options.ascii_only)
        height = options.size.height if self.fills else 10_000
        yield from drawn(self, console, style, height, time.time() if self.fills else self.seen.now)


def drawn(screen: Screen, console: Console, style: Style, height: int, now: float) -> list[Text]:
    """The lines, at most so many."""
    seen, faults = screen.seen, screen.faults
    first = [
        Block([[panels.title(seen, style, now, screen.trouble)]]),
        Block(list(panels.faults(faults, console, style))),
        Block([panels.verdict(screen.verdict, faults, console, style)]),
        Block([[panels.line("alert", Text(remark, "yellow")) for remark in screen.remarks]]),
        Block([[Text()], []]),
    ]
    wide = style.width >= WIDE
    inner = dataclasses.replace(style, width=(style.width - GAP) // 2) if wide else style
    run = [Block(ways) for ways in panels.run(seen, inner)]
    devices = [
        Block(list(panels.gpus(seen, inner))),
        Block(list(panels.network(seen, inner))),
        Block(list(panels.storage(seen, inner))),
    ]
    pods = [Block(list(panels.pods(seen, style if wide else inner)))]
    left, right, below = run, devices, pods
    giving = [
        *pods,
        devices[1],
        devices[2],
        devices[0],
        first[-1],
        *run,
        first[1],
    ]  # in turn, the first first

    def high() -> int:
        sides = (sum(len(block.lines) for block in side) for side in (left, right))
        return sum(len(block.lines) for block in [*first, *below]) + (
            max(sides) if wide else sum(sides)
        )

    for way in range(1, max(len(block.ways) for block in giving)):
        for block in giving:
            if high() > height and way < len(block.ways):
                block.chosen = way
    head = [each for block in first for each in block.lines]
    tail = [each for block in below for each in block.lines]
    sides = [[each for block in side for each in block.lines] for side in (left, right)]
    body = list(beside(sides[0], sides[1], inner.width)) if wide else sides[0] + sides[1]
    return [fitted(each, style.width) for each in [*head, *body, *tail]][:height]


def beside(left: Sequence[Text], right: Sequence[Text], width: int) -> Iterator[Text]:
    """Two columns, each so wide."""
    for n in range(max(len(left), len(right))):
        one = fitted(left[n], width) if n < len(left) else Text()
        one.pad_right(width + GAP - one.cell_len)
        yield one.append_text(fitted(right[n], width)) if n < len(right) else one


def fitted(text: Text, width: int) -> Text:
    """One line, no wider than that."""
    one = text.copy()
    # one for one, so that colours stay where they are
    one.plain = SURROGATES.sub("\ufffd", CONTROLS.sub(" ", one.plain))
    one.no_wrap, one.overflow = True, "ellipsis"
    one.truncate(width, overflow="ellipsis")
    return one
