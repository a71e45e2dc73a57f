"""Downloads one file from one address. A transfer that breaks off is resumed, if the server can."""

import contextlib
import http.client
import time
import urllib.error
import urllib.request
from pathlib import Path

from train.data.sources.content import foreign
from train.data.sources.hub import PASSES, SILENCE_S
from train.evaluate.core.tasks import CoreError

TRIES = 4
PAUSE_S = 1.0  # before the second try; twice as long before each next
PIECE = 2**20
# Not OSError itself: a file that cannot be written is no fault of the network.
NETWORK = (
    urllib.error.URLError,
    http.client.HTTPException,
    TimeoutError,
    ConnectionError,
    ValueError,
)


class Incomplete(Exception):
    """Not all of the file has come. The message says why; trying again may help."""


def download_file(url: str, target: Path) -> None:
    """Download to a file. Raises CoreError if that fails TRIES times, OSError if it cannot be written."""
    target.unlink(missing_ok=True)
    tag = ""  # what the server calls this version of the file
    why = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE_S * 2 ** (attempt - 1))
        try:
            have = target.stat().st_size if tag and target.exists() else 0
            headers = {"User-Agent": "pure-transformer"}
            if have:
                headers |= {"Range": f"bytes={have}-", "If-Range": tag}
            request = urllib.request.Request(url, headers=headers)
            with urllib.request.urlopen(request, timeout=SILENCE_S) as answer:
                tag = answer.headers.get("ETag", "")
                write_body(answer, target, have if answer.status == 206 else 0)
            return
        except urllib.error.HTTPError as error:
            why = describe(error)
            if error.code not in PASSES and error.code < 500:
                break
        except Incomplete as error:
            why = str(error)
        except NETWORK as error:
            why = f"{type(error).__name__}: {getattr(error, 'reason', error)}"
    raise CoreError(f"{url}: {why}")


def write_body(answer: http.client.HTTPResponse, target: Path, have: int) -> None:
    """Write what a server sends after the bytes that are there. Raises Incomplete."""
    length = answer.headers.get("Content-Length")
    with open(target, "ab" if have else "wb") as file:
        while piece := read(answer):
            file.write(piece)
    size = target.stat().st_size
    if length is not None and size != have + int(length):
        raise Incomplete(f"{size} of {have + int(length)} bytes came")


def read(answer: http.client.HTTPResponse | urllib.error.HTTPError) -> bytes:
    """Read the next piece of a body; b"" at its end. Raises Incomplete."""
    try:
        return answer.read(PIECE)
    except (http.client.HTTPException, OSError) as error:
        raise Incomplete(f"{type(error).__name__}: {error}") from None


def describe(error: urllib.error.HTTPError) -> str:
    """Say what a server answers that refuses."""
    start = b""
    with contextlib.suppress(Incomplete):
        start = read(error)
    kind = f" ({foreign(start)})" if foreign(start) else ""
    return f"it answers {error.code} with {len(start)} bytes{kind}, which start with {start[:60]!r}"
