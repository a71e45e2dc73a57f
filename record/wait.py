"""Waiting for what another process or machine does. Standard library only."""

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def wait(
    look: Callable[[], Value],
    limit_s: float,
    tick_s: float,
    is_stopped: Callable[[], bool] = lambda: False,
    say: Callable[[], None] = lambda: None,
) -> Value:
    """Look until there is something, and return it.

    Args:
        look: returns what is waited for, or something false while it is not there.
        limit_s: seconds after which it is given up; what is returned then is false.
        tick_s: seconds between two looks.
        is_stopped: whether nobody waits any more.
        say: called once, if the first look was in vain.
    """
    deadline = time.monotonic() + limit_s
    is_said = False
    while True:
        value = look()
        if value or is_stopped() or time.monotonic() >= deadline:
            return value
        if not is_said:
            say()
            is_said = True
        time.sleep(tick_s)
