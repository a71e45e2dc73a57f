"""Code that is killed at any of its writes, inside the test's own process."""

import os
from collections.abc import Callable
from typing import Any

import pytest

WRITES = ("fsync", "replace", "unlink")


class Killed(BaseException):
    """Ends the process as far as the code under test can tell: nothing of it handles this."""


def killed_at(point: int, action: Callable[[], object]) -> bool:
    """Act until just before (even points) or behind (odd ones) a write, whether that was reached."""
    calls = [0]

    def wrapped(real: Any) -> Any:
        def write(*args: Any, **kwargs: Any) -> Any:
            if calls[0] == point:
                raise Killed
            result = real(*args, **kwargs)
            calls[0] += 2
            if calls[0] - 1 == point:
                raise Killed
            return result

        return write

    with pytest.MonkeyPatch.context() as patch:
        for name in WRITES:
            patch.setattr(os, name, wrapped(getattr(os, name)))
        try:
            action()
        except Killed:
            return True
    return False
