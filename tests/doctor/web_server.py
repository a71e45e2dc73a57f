"""A server on the loopback interface that answers as it is told to, or does not."""

import http.server
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Reply = tuple[int, Mapping[str, str], bytes]


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, reply: Callable[[str], Reply | str]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = reply  # of a path; "hangs", "drips" or "closes" instead of an answer
        self.requests: list[tuple[str, str, Mapping[str, str], bytes]] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever asked may have hung up."""

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path, dict(self.headers), body))
        reply = self.server.reply(self.path)
        if reply == "closes":
            return
        if reply == "hangs":
            time.sleep(60)
        if reply == "drips":  # a byte now and then, which no time-out of a socket sees
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
            for _ in range(600):
                self.wfile.write(b".")
                time.sleep(0.1)
        assert isinstance(reply, tuple)
        status, headers, content = reply
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def server(reply: Callable[[str], Reply | str]) -> Iterator[Server]:
    """A server for as long as the block runs."""
    running = Server(reply)
    threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield running
    finally:
        running.shutdown()
        running.server_close()
