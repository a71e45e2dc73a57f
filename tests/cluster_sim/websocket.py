"""The server's side of kubectl exec: channels over a WebSocket, as protocol v5.channel.k8s.io has them."""

import base64
import hashlib
import json
import struct
from http.server import BaseHTTPRequestHandler

PROTOCOL = "v5.channel.k8s.io"
MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455
STDIN, STDOUT, STDERR, STATUS, CLOSE = 0, 1, 2, 3, 255
BINARY, CLOSED, PING, PONG = 2, 8, 9, 10
LARGEST = 2**15  # bytes of a message of ours


class Channels:
    """An open connection."""

    def __init__(self, handler: BaseHTTPRequestHandler):
        accept = hashlib.sha1((handler.headers["Sec-WebSocket-Key"] + MAGIC).encode()).digest()
        handler.send_response(101)
        for name, value in {
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Protocol": PROTOCOL,
            "Sec-WebSocket-Accept": base64.b64encode(accept).decode(),
        }.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.close_connection = True
        self.into, self.out = handler.rfile, handler.wfile

    def frame(self, opcode: int, content: bytes) -> None:
        length = len(content)
        head = bytes([0x80 | opcode, length if length < 126 else 126 if length < 2**16 else 127])
        more = b"" if length < 126 else struct.pack(">H" if length < 2**16 else ">Q", length)
        self.out.write(head + more + content)
        self.out.flush()

    def send(self, channel: int, content: bytes) -> None:
        for start in range(0, len(content), LARGEST):
            self.frame(BINARY, bytes([channel]) + content[start : start + LARGEST])

    def receive(self) -> tuple[int, bytes]:
        """The next frame's opcode and content; raises EOFError at the end."""
        head = self.into.read(2)
        if len(head) < 2:
            raise EOFError
        length = head[1] & 0x7F
        if length >= 126:
            length = (
                struct.unpack(">H", self.into.read(2))[0]
                if length == 126
                else struct.unpack(">Q", self.into.read(8))[0]
            )
        mask = self.into.read(4) if head[1] & 0x80 else bytes(4)
        content = self.into.read(length)
        whole = (
            int.from_bytes(content, "big")
            ^ int.from_bytes((mask * (length // 4 + 1))[:length], "big")
            if length
            else 0
        )
        return head[0] & 0x0F, whole.to_bytes(length, "big")

    def stdin(self) -> bytes:
        """All that the other side has to say, until it closes that channel."""
        said = b""
        while True:
            opcode, content = self.receive()
            if opcode == PING:
                self.frame(PONG, content)
            elif opcode == CLOSED or content[:1] == bytes([CLOSE]):
                return said
            elif content[:1] == bytes([STDIN]):
                said += content[1:]

    def end(self, code: int) -> None:
        """Say the exit code, and that this is all."""
        status = (
            {"metadata": {}, "status": "Success"}
            if code == 0
            else {
                "metadata": {},
                "status": "Failure",
                "reason": "NonZeroExitCode",
                "message": f"command terminated with non-zero exit code: exit status {code}",
                "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
            }
        )
        self.send(STATUS, json.dumps(status).encode())
        self.frame(CLOSED, struct.pack(">H", 1000))
