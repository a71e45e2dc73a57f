"""The desk beside the lighthouse: where each site says who it is, how far it is, and that it lives. By HTTP, as JSON.

    PUT /3       what site 3 says of itself            GET /      what all have said, by site: curl shows it
    DELETE /3    it ends

torchft's lighthouse knows who takes part in an exchange, not with which settings, nor whether somebody is on the way.
A thread of each site counts its `beat` up every few seconds. No clocks are compared: a site lives if its beat moves, or
has just appeared, while another looks. Standard library only.

Anyone who reaches the port can write here, as with the lighthouse: both belong into a private network.
"""

import contextlib
import http.client
import http.server
import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

SYNC_STREAMS = 16  # connections between two sites: one alone does not fill 1 Gbit/s at 30 ms
BEAT_S = 2.0  # between two beats
LOOK_S = 3 * BEAT_S  # who has not moved by then is gone
CALL_S = 10.0  # for the desk to answer
LONGEST = 2**20  # bytes that a site may say


class NoDesk(Exception):
    """The desk cannot be reached; the message says where it should be."""


def own_address(lighthouse: str) -> str:
    """Return the address from which this machine reaches the lighthouse: the other sites reach it there.

    Connecting a UDP socket sends nothing. The system only chooses the route, and with it the address.
    Raises OSError where the host does not resolve or no route leads to it.
    """
    host, _, port = lighthouse.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


class Answers(http.server.BaseHTTPRequestHandler):
    """One call at the desk."""

    said: dict[str, Any]  # by site, of the server

    def do_GET(self) -> None:
        self.answer(200, self.said)

    def do_PUT(self) -> None:
        try:
            size = int(self.headers.get("Content-Length", ""))
            if not 0 < size <= LONGEST or not self.path[1:].isdecimal():
                raise ValueError
            self.said[self.path[1:]] = json.loads(self.rfile.read(size))
        except ValueError:
            return self.answer(400, {"error": "PUT /SITE with an object in JSON"})
        self.answer(200, {})

    def do_DELETE(self) -> None:
        self.said.pop(self.path[1:], None)
        self.answer(200, {})

    def answer(self, code: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode() + b"\n"
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Nothing of every beat."""


def opened(port: int) -> http.server.ThreadingHTTPServer:
    """The desk itself, at work in a thread; listens on all IPv4 addresses. Raises OSError."""
    answers = type("AnswersHere", (Answers,), {"said": {}})
    server = http.server.ThreadingHTTPServer(("", port), answers)
    threading.Thread(target=server.serve_forever, name="desk", daemon=True).start()
    return server


class Desk:
    """What a site says and hears there. One process of the site has it."""

    def __init__(self, lighthouse: str, site: int, sites: int, facts: dict[str, Any]):
        """lighthouse: host:port; the desk is one port further. facts: who this is, beside `outer`, the number of
        exchanges it has seen."""
        host, _, port = lighthouse.rpartition(":")
        self.host, self.port, self.site, self.sites = host, int(port) + 1, site, sites
        self.said = facts | {"token": uuid.uuid4().hex, "beat": 0, "outer": 0}
        self.over = threading.Event()
        self.thread: threading.Thread | None = None

    def ask(self, method: str, path: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        """What the desk answers. Raises NoDesk."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=CALL_S)
        try:
            with contextlib.closing(connection):
                connection.request(method, path, json.dumps(content) if content else None)
                answer = connection.getresponse()
                found: dict[str, Any] = json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoDesk(f"no desk answers at {self.host}:{self.port} ({error})") from None
        if answer.status != 200:
            raise NoDesk(f"{self.host}:{self.port} is no desk of a lighthouse: {found}")
        return found

    def say(self, **facts: Any) -> None:
        """Put down what is new. Raises NoDesk."""
        self.said |= facts | {"beat": self.said["beat"] + 1}
        self.ask("PUT", f"/{self.site}", self.said)

    def read(self) -> dict[int, dict[str, Any]]:
        """What each site of the run has put down, as far as any has. Raises NoDesk."""
        return {
            int(site): said for site, said in self.ask("GET", "/").items() if int(site) < self.sites
        }

    def living(
        self,
        patience_s: float = LOOK_S,
        enough: Callable[[dict[int, dict[str, Any]]], bool] | None = None,
    ) -> dict[int, dict[str, Any]]:
        """What those sites say that live, this one left out. Looks for patience_s, or until what was seen is enough,
        or all live. Raises NoDesk."""
        first, found = self.read(), dict[int, dict[str, Any]]()
        deadline = time.monotonic() + patience_s
        while True:
            for site, said in self.read().items():
                before = first.get(site, {})
                if site != self.site and (said["token"], said["beat"]) != (
                    before.get("token"),
                    before.get("beat"),
                ):
                    found[site] = said
            if (
                len(found) == self.sites - 1
                or (enough and enough(found))
                or time.monotonic() > deadline
            ):
                return found
            time.sleep(0.2)

    def double(self) -> dict[str, Any] | None:
        """Another process that lives and says that it is this site, before this one has said anything."""
        before = self.read().get(self.site)
        if before is None:
            return None
        deadline = time.monotonic() + LOOK_S
        while time.monotonic() < deadline:
            now = self.read().get(self.site)
            if now and now["token"] == before["token"] and now["beat"] != before["beat"]:
                return now
            time.sleep(0.2)
        return None

    def live(self) -> None:
        """Beat from now on, in a thread; where the desk is away it goes on trying."""

        def beat() -> None:
            while not self.over.wait(BEAT_S):
                with contextlib.suppress(NoDesk):
                    self.say()

        self.thread = threading.Thread(target=beat, name="desk", daemon=True)
        self.thread.start()

    def leave(self, done: bool) -> None:
        """This site ends: it takes its words back, or leaves behind that the run is done."""
        self.over.set()
        if self.thread:
            self.thread.join(CALL_S)
        with contextlib.suppress(NoDesk):
            if done:
                self.say(done=True)
            else:
                self.ask("DELETE", f"/{self.site}")
