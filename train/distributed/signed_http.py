"""HTTP between the machines of a run, signed with the secret that they share. Standard library only.

    GET /                        -> a nonce, which belongs to this connection and is used once
    METHOD PATH  Signature: ...  -> the answer, which is signed, too

A signature is the HMAC-SHA256 of the nonce, the method, the path and the body. A request that was
overheard cannot be sent again: its nonce is gone. Whoever does not know the secret changes nothing
and is counted: MOST_STRANGERS connections at a time, each for TIMEOUT_S, each with LONGEST bytes.
Nothing is encrypted: who can listen can read what is sent.
"""

import abc
import contextlib
import errno
import hmac
import http.client
import http.server
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from settings.addresses import is_ip_address, is_loopback
from train.distributed.pod import in_pod

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0  # of a connection, until its request is known to be of this run
LONGEST = 2**17  # bytes of a request; the facts of a node take 3 kB
MOST_STRANGERS = 128  # connections whose request is not known to be of this run

FindSecret = Callable[[], str | None]  # None while this machine does not know it


class WrongSecret(Exception):
    """One side does not know the run's secret."""


def sign(secret: str, *parts: str | bytes) -> str:
    """Return the HMAC-SHA256 over parts and their lengths, in hex."""
    mac = hmac.new(secret.encode(), digestmod="sha256")
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        mac.update(b"%d:" % len(data))
        mac.update(data)
    return mac.hexdigest()


def is_same(given: str | None, expected: str) -> bool:
    """Compare signatures in a time that does not depend on where they differ."""
    return hmac.compare_digest(str(given).encode(), expected.encode())


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address of this machine. Raises OSError, and socket.gaierror for a name without an address.

    A name may mean another address here than elsewhere: for a name, and for an address that this
    machine does not have, as behind NAT, listen on all addresses.
    """
    if is_ip_address(host) or is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    elif not in_pod():  # there a name may have its address only when all pods are there
        socket.getaddrinfo(host, port)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both)


class SignedServer(http.server.ThreadingHTTPServer):
    """Serves in threads from its construction on.

    Args:
        requests: what answers, a subclass of Requests.
    """

    daemon_threads = True

    def __init__(self, listener: socket.socket, requests: type, find_secret: FindSecret):
        super().__init__(("", 0), requests, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.find_secret = find_secret
        self.strangers: dict[Any, float] = {}  # connection -> when it was opened
        self.refused = 0
        threading.Thread(target=self.serve_forever, name="registry", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.strangers[request] = time.monotonic()
        super().process_request(request, client_address)

    def count_stranger(self) -> None:
        self.refused += 1
        if self.refused.bit_count() == 1:  # 1, 2, 4, 8 and so on
            log.warning("%d requests without the run's secret were refused", self.refused)

    def service_actions(self) -> None:
        """Cut off who is slow or too many. Called after each connection is taken."""
        now = time.monotonic()
        for number, (request, since) in enumerate(reversed(list(self.strangers.items()))):
            if number >= MOST_STRANGERS or now - since > TIMEOUT_S:
                self.strangers.pop(request, None)
                self.count_stranger()
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        self.strangers.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request failed", exc_info=True)


class Requests(http.server.BaseHTTPRequestHandler, abc.ABC):
    """One connection: a nonce, and one signed request.

    Attributes:
        secret, signature: of a request of this run; its answer is signed with both.
    """

    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT_S
    server: SignedServer
    nonce = ""
    secret: str
    signature: str

    def do_GET(self) -> None:
        if self.path == "/" and not self.nonce:
            self.nonce = secrets.token_hex(16)
            self.answer(200, Nonce=self.nonce)
            return
        self.close_connection = True
        secret = self.server.find_secret()
        length = self.headers.get("Content-Length", "0")
        is_short = length.isdecimal() and len(length) < 10 and int(length) <= LONGEST
        if secret is not None and self.nonce and is_short:
            body = self.rfile.read(int(length))
            self.secret = secret
            self.signature = sign(secret, self.nonce, self.command, self.path, body)
            if is_same(self.headers.get("Signature"), self.signature):
                self.server.strangers.pop(self.connection, None)
                self.respond(body)
                return
        self.send_error(401)

    do_PUT = do_GET

    @abc.abstractmethod
    def respond(self, body: bytes) -> None:
        """Answer a request of this run."""

    def send_error(self, code: int, message: Any = None, explain: Any = None) -> None:
        """Refuse a stranger's request, also one that is no HTTP."""
        self.close_connection = True
        self.server.count_stranger()
        self.answer(401)

    def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Print nothing that comes from outside."""


@contextlib.contextmanager
def signed_request(
    address: tuple[str, int],
    find_secret: FindSecret,
    method: str,
    path: str,
    body: bytes = b"",
    timeout_s: float = TIMEOUT_S,
) -> Iterator[tuple[http.client.HTTPResponse, str, str]]:
    """Send a request.

    Yields:
        The answer, the secret, and the signature of the request. The caller checks the signature
        of the answer, which is made of these and the answer's body.

    Raises:
        WrongSecret, OSError, http.client.HTTPException
    """
    with contextlib.closing(http.client.HTTPConnection(*address, timeout=timeout_s)) as connection:
        connection.request("GET", "/")
        hello = connection.getresponse()
        hello.read()
        nonce = hello.headers.get("Nonce")
        if not nonce:
            raise http.client.HTTPException("it gives no nonce")
        secret = find_secret()  # now: the server has just made it, if it is in a file
        if secret is None:
            raise WrongSecret
        signature = sign(secret, nonce, method, path, body)
        connection.request(method, path, body, {"Signature": signature})
        answer = connection.getresponse()
        if answer.status == 401:
            raise WrongSecret
        yield answer, secret, signature
