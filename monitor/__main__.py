"""make monitor: one screen of a run on this machine or in a cluster (WHERE), and what is wrong with it.

python -m monitor      a screen, renewed every two seconds, until Ctrl-C or the end of the run
ONCE=1                 plain text, once; where standard output is no terminal, anew whenever something changes
exit code              0; 1 where something is wrong; 64 a bad setting; 78 no such run, or one that may not be read
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from k8s.cluster.kubectl import BAD_SETTING, Refused
from k8s.cluster.where import decide
from monitor.watch import NO_RUN, NoRun, View, Watcher, unreadable, watcher_of
from record.default_run import choose_run
from settings import SettingsError, explain_error
from settings.resolve import take_words
from settings.terminal import complain

TICK_S = 1.0  # between two drawings: ages go on between two looks
NOTICE_S = 0.1  # between two looks whether a signal has come
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(words: Sequence[str] = ()) -> int:
    """Returns the exit code."""
    try:
        take_words(words)
        place = decide(chosen=choose_run(with_sent=True))
        if place.config.alert_cmd:
            from monitor.alert import command_of

            command_of(
                place.config
            )  # a program that cannot be run is said before a screen hides it
        watcher = watcher_of(place)
        if place.config.once:
            return once(watcher)
        return live(watcher) if is_screen() else follow(watcher)
    except SettingsError as error:
        complain(explain_error(error))
        return BAD_SETTING
    except Refused as refused:
        complain(refused.sentence)
        return refused.code
    except NoRun as error:
        complain(error)
        return NO_RUN
    except PermissionError as error:
        complain(unreadable(error))
        return NO_RUN
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # who read this has left, as of make monitor | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def is_screen() -> bool:
    """Whether standard output is a terminal that a screen can be drawn on."""
    if not sys.stdout.isatty():
        return False
    from rich.console import Console

    return not Console().is_dumb_terminal


def say(view: View) -> None:
    """Plain text."""
    from monitor.phrases import clean
    from monitor.text import text

    sys.stdout.write(text(view.seen, view.faults, view.verdict))
    sys.stdout.write(
        "".join(
            [
                *([f"look: {clean(view.trouble)}\n"] if view.trouble else []),
                *(f"alert: {clean(remark)}\n" for remark in view.remarks),
            ]
        )
    )
    sys.stdout.flush()


def end(watcher: Watcher) -> None:
    """Let what rings ring; say what has gone wrong with it since."""
    for remark in watcher.end():
        complain(remark)


def once(watcher: Watcher) -> int:
    try:
        view = watcher.once()
        say(view)
        return view.code
    finally:
        end(watcher)


def follow(watcher: Watcher) -> int:
    """Plain text at first, whenever phase, faults or verdict are others, and at the end: for a log, or a pipe."""
    watcher.start()
    said: object = None
    try:
        while True:
            watcher.wait(60)
            view = watcher.view
            if view is None:
                if watcher.gone:
                    raise watcher.gone
                continue
            if view.told != said:
                if said is not None:
                    sys.stdout.write("\n")
                say(view)
                said = view.told
            if view.over:
                return view.code
    except KeyboardInterrupt:
        return watcher.view.code if watcher.view else 128 + signal.SIGINT
    finally:
        end(watcher)


def live(watcher: Watcher) -> int:
    """The screen, until Ctrl-C or the end of the run; what it showed last stays in the terminal."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)

    def drawing(fills: bool = True) -> Any:
        view = watcher.view
        if view is None:
            return f"looking ... {watcher.looking_s:.0f} s"
        from monitor.screen import Screen

        return Screen(view.seen, view.faults, view.verdict, view.trouble, view.remarks, fills)

    told: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        """Noted only: an exception or a lock here could meet the screen's and the watcher's locks half taken."""
        if number in told and number != signal.SIGWINCH:
            raise SystemExit(
                128 + number
            )  # told again: it hangs, as where a terminal takes no more
        told.append(number)

    def wait() -> None:
        """Until there is something new, a signal, or the time to draw ages anew."""
        before, deadline = len(told), time.monotonic() + TICK_S
        while len(told) == before and time.monotonic() < deadline and not watcher.wait(NOTICE_S):
            pass

    handlers = {number: signal.signal(number, note) for number in (signal.SIGWINCH, *STOPS)}
    code = 128 + signal.SIGINT
    try:
        with Live(
            console=console, screen=True, auto_refresh=False, get_renderable=drawing
        ) as screen:
            screen.refresh()
            watcher.start()  # which loads what it needs beside what is shown already
            while (
                not stops(told)
                and watcher.gone is None
                and not (watcher.view and watcher.view.over)
            ):
                wait()
                screen.refresh()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if watcher.view:
            console.print(drawing(fills=False))
            code = watcher.view.code
        end(watcher)
    if stops(told) and stops(told)[0] != signal.SIGINT:
        return 128 + stops(told)[0]
    if watcher.gone:
        raise watcher.gone
    return code


def stops(told: list[int]) -> list[int]:
    """Those of these signals that ask to end."""
    return [number for number in told if number in STOPS]


def told_to_stop(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)  # the terminal is given back on the way out


if __name__ == "__main__":
    for told in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(told, told_to_stop)
    sys.exit(main(sys.argv[1:]))
