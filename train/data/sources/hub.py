"""What is asked of the Hugging Face hub, and what a bad answer means: the only place that knows.

    401, 403, gated     stop at once; the remedy is a token, or the licence on the data set's page
    404                 stop at once; the name, config or revision is wrong
    429, 408, 5xx       asked again, after Retry-After where the hub says it, else after a growing pause with jitter
    no connection, time-outs, short bodies, wrong bytes, a web page instead of data
                        asked again likewise

A question is asked TRIES times at most (TRIES_OFFLINE where the name of the hub does not resolve: there is no network),
and no more TOTAL_S seconds after it first failed. The hub's client has retries of its own, which wait as long as they
are told, resume a download that brings half again and again, and know no bound on all of that together: hooks in its
HTTP session take over what they can, and stop the rest.
"""

import errno
import functools
import logging
import math
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from train.data.sources.source import CorpusError

TRIES = 8
TRIES_OFFLINE = 2  # where the name of the server does not resolve: there is no network
GO_ONLINE = "Check the network, or get the files on another machine and name them here"
TOTAL_S = (
    90.0  # from the first failure to the last question, and of the same request within one question
)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 20.0
SILENCE_S = 10.0  # a connection on which nothing comes for so long is given up
REFUSED = (401, 403, 404)
PASSES = (408, 429)  # and 500 to 599
FINAL = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    FileNotFoundError,
)  # unless the network is at their root
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)

log = logging.getLogger(__name__)
question = (
    threading.local()
)  # of this thread: what was requested for it, and until when that may be repeated
T = TypeVar("T")


class Unanswered(CorpusError):
    """The hub gave no good answer within the bounds; it may do so later, or to another machine."""

    machine_fault = "hub"


class NoNetwork(Unanswered):
    """The name of the hub does not resolve."""


class Again(Exception):
    """An answer that may be another one a moment later. after_s: how long the hub asks to wait, where it does."""

    def __init__(self, what: str, after_s: float = 0.0):
        super().__init__(what)
        self.after_s = after_s


class Late(Exception):
    """The hub's client went on requesting the same for TOTAL_S."""


def ask(
    repository: str,
    what: str,
    answer: Callable[[], T],
    page: str = "https://huggingface.co/datasets/",
) -> T:
    """What answer() returns, asked again by the rules above. what: the end of "the hub does not give ..."; page: where
    repositories of its kind are shown."""

    def judge(error: Exception) -> tuple[str, float]:
        return judged(repository, what, error, page + repository)

    return ask_until(f"the hub does not give {what}", answer, judge, SILENCE_S)


def ask_until(
    failure: str,
    answer: Callable[[], T],
    judge: Callable[[Exception], tuple[str, float]],
    silence_s: float,
) -> T:
    """What answer() returns, asked again where that may help.

    failure: what is said, before the cause. judge: returns the cause in words, and the seconds to wait at least; it
    raises where asking again cannot help. silence_s: a connection on which nothing comes for so long is given up.
    """
    take_over()
    began, failed = time.monotonic(), math.inf
    for attempt in range(1, TRIES + 1):
        question.requested, question.until, question.silence_s = set(), math.inf, silence_s
        try:
            return answer()
        except CorpusError:
            raise
        except (
            Exception
        ) as error:  # the hub's client raises a score of types; what matters is at the root of them
            cause, after_s = judge(error)
            is_late = any(isinstance(each, Late) for each in causes(error))
            is_offline = any(isinstance(each, socket.gaierror) for each in causes(error))
        finally:
            del question.requested, question.until, question.silence_s
        pause_s = max(
            after_s,
            min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1.5),
        )
        failed = min(failed, time.monotonic())
        tries = TRIES_OFFLINE if is_offline else TRIES
        if attempt >= tries or is_late or time.monotonic() + pause_s > failed + TOTAL_S:
            break
        log.warning(
            "%s: %s; asking again in %.1f s (%d of %d)", failure, cause, pause_s, attempt, tries - 1
        )
        time.sleep(pause_s)
    if is_offline:
        raise NoNetwork(f"{failure}: no network ({cause}). {GO_ONLINE}.")
    wait = f", and it asks to wait {after_s:.0f} s" if after_s > TOTAL_S else ""
    raise Unanswered(
        f"{failure}: {cause}{wait}; asked {attempt} times in {time.monotonic() - began:.0f} s; check the "
        "network, and run the same command again later"
    )


def judged(repository: str, what: str, error: Exception, page: str) -> tuple[str, float]:
    """The error in words, and the seconds to wait at least; CorpusError where asking again cannot help."""
    for cause in causes(error):
        if isinstance(cause, (Again, Late)):
            return str(cause), getattr(cause, "after_s", 0.0)
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status in REFUSED:
            raise refusal(repository, what, status, cause, page) from error
        if type(cause).__name__ == "OfflineModeIsEnabled":
            raise CorpusError(
                f"the hub is not asked for {what}: HF_HUB_OFFLINE is set; unset it"
            ) from error
    chain = causes(error)
    root = chain[-1] if isinstance(error, (ConnectionError, *FINAL)) else error
    if isinstance(root, OSError) and root.errno in DISK:
        raise CorpusError(
            f"cannot keep {what}: {root}; make room, or another folder DATA_DIR"
        ) from error
    words = " ".join(f"{type(root).__name__}: {root}".split())[:300]
    if all(isinstance(each, FINAL) and "JSON" not in type(each).__name__ for each in chain):
        raise CorpusError(
            f"cannot use {what}: {words}; check the source's repository, config and revision, and "
            f"{page}"
        ) from error
    return words, 0.0


def causes(error: BaseException) -> list[BaseException]:
    """The error and what it came from, the root last."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def refusal(
    repository: str, what: str, status: int, cause: BaseException, page: str
) -> CorpusError:
    """What is said for an answer that will not change by itself."""
    headers: Any = getattr(getattr(cause, "response", None), "headers", {})
    code = headers.get("X-Error-Code", "")
    gated = code == "GatedRepo"
    sentence = f"the hub refuses {what} ({status}{', the data set is gated' if gated else ''})"
    if status == 404 and code in ("EntryNotFound", "RevisionNotFound"):
        return CorpusError(
            f"the hub does not have {what} ({status}); check the source's revision and the files on "
            f"{page}, or delete the pin-*.json of the source and run: make data"
        )
    if status == 404 or (status == 401 and not gated):
        sentence = f"the hub does not show {what} ({status}): {repository} does not exist, or not for everybody"
    return CorpusError(
        f"{sentence}; check the name, set HF_TOKEN to a token that may read it, and accept the license "
        f"on {page} where it asks for that"
    )


@functools.cache
def take_over() -> None:
    """Give the hub's client a session whose bad answers are ours to judge, once a process, and silence it otherwise."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils._http import default_client_factory

    def session() -> Any:
        client = default_client_factory()
        client.event_hooks = {
            "request": [*client.event_hooks["request"], bounded],
            "response": [*client.event_hooks["response"], looked_at],
        }
        return client

    set_client_factory(session)
    disable_progress_bars()
    for library in ("httpx", "httpx2", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)  # each retry is said here, once


def bounded(request: Any) -> None:
    """Hook before a request: it waits silence_s at most, and is not repeated for ever."""
    if not hasattr(question, "requested"):
        return
    path = (
        str(request.url) if "/api/" in request.url.path else request.url.path
    )  # others are signed anew each time
    this = (request.method, path, request.headers.get("Range"))
    if this not in question.requested:
        question.requested.add(this)
        question.until = time.monotonic() + TOTAL_S
    elif time.monotonic() > question.until:
        raise Late(f"no whole answer came within {TOTAL_S:.0f} s")
    timeouts = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {
        kind: min(timeouts.get(kind) or question.silence_s, question.silence_s)
        for kind in ("connect", "read", "write", "pool")
    }


def looked_at(response: Any) -> None:
    """Hook behind an answer's headers: a status that passes, and a web page instead of data, are asked again."""
    if not hasattr(question, "requested"):
        return
    status, path = response.status_code, response.request.url.path
    if status in PASSES or 500 <= status < 600:
        waits = response.headers.get("Retry-After", "")
        raise Again(f"it answers {status}", float(waits) if waits.isdigit() else 0.0)
    is_page = "html" in response.headers.get("Content-Type", "") and not path.endswith(
        (".html", ".htm")
    )
    if status == 200 and is_page:
        size = response.headers.get("Content-Length", "?")
        start = response.read()[:40] if size.isdigit() and int(size) < 2**20 else b""
        raise Again(
            f"a web page comes instead ({size} bytes{f', it starts with {start!r}' if start else ''})"
        )
