"""One question over HTTP, answered within a limit whatever the other side does: the answer, or in words why not.

What is sent to prove who asks goes to the host that is asked and to no other, so a redirect elsewhere is not followed;
nor is anything of it told. Proxies and certificates are those of Python's urllib: HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE.
"""

import base64
import dataclasses
import email.utils
import http.client
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import urlsplit

SILENCE_S = 5.0  # without a byte
LIMIT_S = 8.0  # for all of it, looking up the name included
LARGEST = 2**16  # bytes of an answer that are read

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Answer:
    """status: of HTTP, None where nothing came, and problem then says why. headers: by names in lower case.
    ahead_s: by how much the clock here is ahead of the other side's, None where it tells no time."""

    host: str
    status: int | None = None
    problem: str = ""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""
    ahead_s: float | None = None

    @property
    def ok(self) -> bool:
        return self.status == 200


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def ask(
    url: str, headers: Mapping[str, str], data: bytes | None = None, limit_s: float = LIMIT_S
) -> Answer:
    """The answer to a GET, or with data to a POST of JSON."""
    host = host_of(url)
    answer = within(limit_s, lambda: asked(url, host, headers, data))
    return answer or Answer(host, problem=f"no answer within {limit_s:.0f} s{by_proxy(url)}")


def within(limit_s: float, work: Callable[[], T]) -> T | None:
    """What work() returns, or raises; None where it takes longer, and goes on in a thread that nobody waits for."""
    running: Future[T] = Future()

    def run() -> None:
        try:
            running.set_result(work())
        except BaseException as error:
            running.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return running.result(limit_s)
    except TimeoutError:
        if running.done():  # it was work() that raised it
            raise
        return None


class AtHome(urllib.request.HTTPRedirectHandler):
    """Follows a redirect within the same server only: urllib would take the Authorization along."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        before, behind = urlsplit(req.full_url), urlsplit(newurl)
        if (before.scheme, before.netloc) != (behind.scheme, behind.netloc):
            return None  # the redirect itself is then the answer
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def asked(url: str, host: str, headers: Mapping[str, str], data: bytes | None) -> Answer:
    kind = {"Content-Type": "application/json"} if data is not None else {}
    began = time.time()
    try:
        request = urllib.request.Request(
            url, data, {"User-Agent": "pure-transformer", **kind, **headers}
        )
        with urllib.request.build_opener(AtHome).open(request, timeout=SILENCE_S) as response:
            return answered(host, response.status, response, began)
    except urllib.error.HTTPError as error:
        with error:
            return answered(host, error.code, error, began)
    except (OSError, http.client.HTTPException) as error:
        return Answer(host, problem=words(error) + by_proxy(url))
    except ValueError:  # its text may hold what was sent
        return Answer(
            host,
            problem="it cannot be asked so: the address, token or key has characters that none has",
        )


def answered(host: str, status: int, response: Any, began: float) -> Answer:
    middle = (began + time.time()) / 2
    body = response.read(LARGEST)
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Answer(host, status, "", headers, body, ahead_of(headers, middle))


def ahead_of(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds by which `now` is ahead of what a server says; a Date of whole seconds is half a second late on average.
    None where there is none, or the answer lay in a cache."""
    if "age" in headers:
        return None
    try:
        said = email.utils.parsedate_to_datetime(headers["date"])
        return now - said.timestamp() - 0.5
    except (KeyError, ValueError, TypeError):
        return None


def words(error: BaseException) -> str:
    """Why nothing came, without what was sent."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted ({reason.verify_message}); a proxy that looks into connections has "
            "one of its own, which SSL_CERT_FILE must name, and a clock that is wrong makes any look expired"
        )
    if isinstance(reason, TimeoutError):
        return f"nothing came for {SILENCE_S:.0f} s"
    if isinstance(reason, socket.gaierror):
        return "its name is not found (DNS)"
    if isinstance(reason, OSError):
        return reason.strerror or str(reason) or type(reason).__name__
    if isinstance(reason, str):
        return reason
    return type(reason).__name__


def host_of(url: str) -> str:
    """Host and port, without what may stand before them: user and password."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2]


def by_proxy(url: str) -> str:
    """' (through the proxy HOST)' where one is used."""
    host = host_of(url)
    proxy = urllib.request.getproxies().get(urlsplit(url).scheme)
    if not proxy or urllib.request.proxy_bypass(host):
        return ""
    return f" (through the proxy {host_of(proxy) or 'that is set'})"
