"""How far the making of a source's shards has come: a line every ten seconds."""

import logging
import math
import time
from collections.abc import Sequence

from record import number_formats
from record.metrics import duration
from train.data.sources.rows import Cursor

log = logging.getLogger(__name__)

LINE_S = 10.0


class Progress:
    """Tokens so far, tokens per second, and how long it will take, by the limit or the files that are read.

    Args:
        limit: training tokens to be made, math.inf for all of the files.
        file_bytes: of each file. Of one that is compressed, more text comes than that, and then its end
            is expected too early.
        tokens: made already.
    """

    def __init__(self, name: str, limit: float, file_bytes: Sequence[int], tokens: int):
        self.name = name
        self.limit = limit
        self.file_bytes = file_bytes
        self.before = tokens
        self.file = 0
        self.text_bytes = 0  # that came from the file
        self.share_before: float | None = None
        self.began_s = self.logged_s = time.monotonic()

    def at(self, tokens: int, place: Cursor, text_bytes: int = 0) -> None:
        """Take in a document: training tokens so far, its place in the source, the bytes of its text."""
        if place.file != self.file:
            self.file = place.file
            self.text_bytes = 0
        self.text_bytes += text_bytes
        if self.share_before is None:
            self.share_before = self.share(tokens)
        now = time.monotonic()
        if now - self.logged_s < LINE_S:
            return
        self.logged_s = now
        seconds = now - self.began_s
        share = self.share(tokens)
        of_limit = "" if math.isinf(self.limit) else f" of {number_formats.count(self.limit)}"
        rate = number_formats.rate((tokens - self.before) / seconds)
        line = f"{number_formats.count(tokens)}{of_limit} tokens, {rate}"
        done = share - self.share_before
        if done > 0.001:
            line += f", {duration(seconds / done * (1 - share))} left"
        log.info("source %s: %s", self.name, line)

    def share(self, tokens: int) -> float:
        """Return how much is done, from 0 to 1."""
        read = sum(self.file_bytes[: self.file]) + min(self.text_bytes, self.file_bytes[self.file])
        by_bytes = read / max(1, sum(self.file_bytes))
        return min(1.0, max(tokens / self.limit, by_bytes))
