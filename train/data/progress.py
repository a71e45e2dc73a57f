"""How far the making of a source's shards has come: a bar on a terminal, else a line now and then."""

import logging
import math
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from record.metrics import duration
from train.data.sources.rows import Cursor

log = logging.getLogger(__name__)

LINE_S = 10.0  # between two lines where there is no terminal


class Progress:
    """Tokens so far, tokens per second, and how long it will take, by the limit or the files that are read."""

    def __init__(
        self, name: str, limit: float, file_bytes: Sequence[int], tokens: int, plain: bool = False
    ):
        """limit: training tokens to be made, math.inf for all of the files; tokens: made already; plain: files have
        about as many bytes as the text in them."""
        self.name, self.limit, self.before, self.tokens = name, limit, tokens, tokens
        self.file, self.read = 0, 0  # the file that is read, and bytes of text that came out of it
        self.a_byte = (
            1.0 if plain else 0.0
        )  # of text from a byte of file, by the last that was read whole; 0: unknown
        self.whole = True  # whether the file was read from its start
        self.bytes_before = [sum(file_bytes[:i]) for i in range(len(file_bytes) + 1)]
        self.began = self.said = time.monotonic()
        self.first: float | None = None  # the share that was done before
        self.bar: Any = None
        self.task: Any = None
        self.handlers: list[
            logging.StreamHandler[Any]
        ] = []  # those of the log that write where the bar is

    def __enter__(self) -> "Progress":
        if sys.stdout.isatty():
            from rich import progress as rich  # takes 50 ms

            self.bar = rich.Progress(
                rich.TextColumn("{task.description}"),
                rich.BarColumn(),
                rich.TaskProgressColumn(),
                rich.TextColumn("{task.fields[words]}"),
                refresh_per_second=4,
                transient=True,
            )
            self.handlers = [
                handler
                for handler in logging.getLogger().handlers
                if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout
            ]
            self.bar.start()  # from here on what goes to sys.stdout comes above the bar
            self.log_to_stdout()
            self.task = self.bar.add_task(self.name, total=1.0, words="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar:
            self.bar.stop()
            self.log_to_stdout()

    def log_to_stdout(self) -> None:
        for handler in self.handlers:
            handler.setStream(sys.stdout)

    def at(self, tokens: int, place: Cursor, text_bytes: int = 0) -> None:
        """So many training tokens are made, and the source is read up to here, with a document of so many bytes."""
        self.tokens, now = tokens, time.monotonic()
        if self.first is None:
            self.file, self.whole, self.first = place.file, place.row == 0, self.share(place)
        if place.file != self.file:
            if self.whole and self.read:
                self.a_byte = self.read / max(
                    1, self.bytes_before[self.file + 1] - self.bytes_before[self.file]
                )
            self.file, self.read, self.whole = place.file, 0, True
        self.read += text_bytes
        if now - self.said < (0.25 if self.bar else LINE_S):
            return
        self.said, share = now, self.share(place)
        if self.bar:
            self.bar.update(self.task, completed=share, words=self.words(share, now))
        else:
            log.info("source %s: %s", self.name, self.words(share, now))

    def share(self, place: Cursor) -> float:
        """How much is done, from 0 to 1."""
        by_tokens = 0.0 if math.isinf(self.limit) else self.tokens / self.limit
        read, end = (
            self.bytes_before[place.file],
            self.bytes_before[min(place.file + 1, len(self.bytes_before) - 1)],
        )
        if self.a_byte and self.whole:
            read = min(end, read + round(self.read / self.a_byte))
        return min(1.0, max(by_tokens, read / max(1, self.bytes_before[-1])))

    def words(self, share: float, now: float) -> str:
        seconds = now - self.began
        of = "" if math.isinf(self.limit) else f" of {self.limit / 1e6:,.1f}"
        said = f"{self.tokens / 1e6:,.1f}{of}M tokens, {(self.tokens - self.before) / seconds / 1e6:.2f}M tokens/s"
        done = share - (self.first or 0.0)
        return f"{said}, {duration(seconds / done * (1 - share))} left" if done > 0.001 else said
