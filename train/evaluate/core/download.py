"""One file from one URL, whole: what breaks off is gone on with where the server can, and asked for again else."""

import contextlib
import http.client
import time
import urllib.error
import urllib.request
from pathlib import Path

from train.data.sources.fetch import foreign
from train.data.sources.hub import PASSES, SILENCE_S
from train.evaluate.core.tasks import CoreError

TRIES, PAUSE_S = 4, 1.0
PIECE = 2**20


def bring(url: str, target: Path) -> None:
    """Download to a file that did not count before. Raises CoreError after TRIES, at once where asking again is of no
    use; OSError where the file cannot be written."""
    target.unlink(missing_ok=True)
    tag, why = "", ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE_S * 2 ** (attempt - 1))
        have = target.stat().st_size if target.exists() and tag else 0
        request = urllib.request.Request(
            url,
            headers={"User-Agent": "pure-transformer"}
            | ({"Range": f"bytes={have}-", "If-Range": tag} if have else {}),
        )
        try:
            with urllib.request.urlopen(request, timeout=SILENCE_S) as answer:
                goes_on = answer.status == 206
                tag = answer.headers.get("ETag", "")
                length = answer.headers.get("Content-Length")
                have = have if goes_on else 0
                with open(target, "ab" if goes_on else "wb") as file:
                    while piece := read(answer):
                        file.write(piece)
            size = target.stat().st_size
            if length is None or size == have + int(length):
                return
            why = f"{size} of {have + int(length)} bytes came"
        except urllib.error.HTTPError as error:
            start = body_of(error)
            what = f" ({foreign(start)})" if foreign(start) else ""
            why = f"it answers {error.code} with {len(start)} bytes{what}, which start with {start[:60]!r}"
            if error.code not in PASSES and error.code < 500:
                break
        except Broken as error:
            why = str(error)
        except (
            urllib.error.URLError,
            http.client.HTTPException,
            TimeoutError,
            ConnectionError,
            ValueError,
        ) as error:
            why = f"{type(error).__name__}: {getattr(error, 'reason', error)}"
    raise CoreError(f"{url}: {why}")


class Broken(Exception):
    """A body that ends before its end."""


def read(answer: object) -> bytes:
    """The next piece of a body; b"" at its end."""
    try:
        return answer.read(PIECE)  # type: ignore[attr-defined]
    except (http.client.HTTPException, OSError) as error:
        raise Broken(f"{type(error).__name__}: {error}") from None


def body_of(error: urllib.error.HTTPError) -> bytes:
    """What a server says beside its refusal, up to a piece; b"" where that breaks off."""
    with contextlib.suppress(Broken):
        return read(error)
    return b""
