"""A link for tests, between two ports of this machine: it delays, and lets through so much a second, all connections
together."""

import contextlib
import queue
import socket
import threading
import time

PIECE = 8192
AHEAD_S = 0.1  # so much of what is sent waits in the link, by which a thread that wakes late loses nothing


class SlowLink:
    """Listens on a port of its own and hands on to another. delay_s: each way; bytes_per_s: each way."""

    def __init__(self, to_port: int, delay_s: float, bytes_per_s: float):
        self.to_port, self.delay_s, self.bytes_per_s = to_port, delay_s, bytes_per_s
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self.listener.getsockname()[1])
        self.lock, self.free_at = threading.Lock(), {True: 0.0, False: 0.0}
        threading.Thread(target=self.accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.to_port))
            for side in (near, far):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                side.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * PIECE)
            for start, end, there in ((near, far, True), (far, near, False)):
                waiting: queue.Queue[tuple[float, bytes]] = queue.Queue(maxsize=32)
                threading.Thread(
                    target=self.take, args=(start, waiting, there), daemon=True
                ).start()
                threading.Thread(target=self.give, args=(end, waiting), daemon=True).start()

    def take(
        self, start: socket.socket, waiting: "queue.Queue[tuple[float, bytes]]", there: bool
    ) -> None:
        data = b"first"
        while data:
            try:
                data = start.recv(PIECE)
            except OSError:
                data = b""
            with self.lock:  # a link sends one thing after another
                now = time.monotonic()
                self.free_at[there] = max(now, self.free_at[there]) + len(data) / self.bytes_per_s
                through = self.free_at[there]
            waiting.put((through + self.delay_s, data))
            time.sleep(max(0.0, through - time.monotonic() - AHEAD_S))

    def give(self, end: socket.socket, waiting: "queue.Queue[tuple[float, bytes]]") -> None:
        while True:
            due, data = waiting.get()
            time.sleep(max(0.0, due - time.monotonic()))
            with contextlib.suppress(OSError):
                if not data:
                    end.shutdown(socket.SHUT_WR)
                    return
                end.sendall(data)
