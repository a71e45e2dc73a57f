"""Weights and optimizer state for a site that was away, over HTTP, signed by both sides.

torchft's transport serves whoever asks, on an address that other machines may not know, and reads
pickles. Here the request and the stream are signed (distributed/signed_http.py), and what arrives
is read as tensors only. The signature of the stream follows it: nothing of it is used before that.
"""

import datetime
import hmac
import re
import warnings
from typing import Any

import torch
from torchft.checkpointing._serialization import _streaming_load, _streaming_save
from torchft.checkpointing.http_transport import HTTPTransport

from train.distributed.signed_http import (
    FindSecret,
    Requests,
    SignedServer,
    WrongSecret,
    is_same,
    listen,
    signed_request,
)

CHECKPOINT = re.compile(r"/checkpoint/([0-9]+)/full")
DIGEST = 64  # characters of a signature


class SignedStream:
    """A file that is read or written, and the signature of what went through."""

    def __init__(self, file: Any, secret: str, signature: str):
        self.file = file
        self.mac = hmac.new(secret.encode(), signature.encode(), "sha256")

    def write(self, data: bytes) -> int:
        self.mac.update(data)
        return int(self.file.write(data))

    def read(self, size: int) -> bytes:
        data: bytes = self.file.read(size)
        self.mac.update(data)
        return data

    def readline(self) -> bytes:
        data: bytes = self.file.readline()
        self.mac.update(data)
        return data


class Answers(Requests):
    """Requests for the weights of a step."""

    transport: "Transport"  # of the server

    def respond(self, body: bytes) -> None:
        transport = self.transport
        self.connection.settimeout(transport.timeout_s)
        wanted = CHECKPOINT.fullmatch(self.path)
        with transport._checkpoint_lock.r_lock():  # until there is something to fetch
            if not wanted or int(wanted[1]) != transport._step:
                self.answer(404)
                return
            self.send_response(200)
            self.end_headers()
            stream: Any = SignedStream(self.wfile, self.secret, self.signature)
            _streaming_save(transport._state_dict, stream)
            self.wfile.write(stream.mac.hexdigest().encode())


class Transport(HTTPTransport):
    """torchft's transport with a server of our own.

    Args:
        address: of this site, by which the others know it.
    """

    _server: Any

    def __init__(self, address: str, find_secret: FindSecret, timeout_s: float):
        self.host = f"[{address}]" if ":" in address else address
        self.find_secret = find_secret
        self.timeout_s = timeout_s
        super().__init__(datetime.timedelta(seconds=timeout_s), num_chunks=0)
        self._server.shutdown()
        self._server.server_close()
        answers = type("AnswersHere", (Answers,), {"transport": self})
        self._server = SignedServer(listen(address, 0), answers, find_secret)

    def address(self) -> str:
        return f"http://{self.host}:{self._server.socket.getsockname()[1]}/checkpoint/"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: datetime.timedelta
    ) -> None:
        finish_on_gpu()
        super().send_checkpoint(dst_ranks, step, state_dict, timeout)

    def disallow_checkpoint(self) -> None:
        """Forget, after an exchange, what is several times as large as the model."""
        super().disallow_checkpoint()
        self._state_dict = self._chunks = self._spec = None

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: datetime.timedelta
    ) -> Any:
        """Fetch the weights of a step. Raises OSError or WrongSecret, which torchft reports."""
        host, _, port = (
            metadata.removeprefix("http://").removesuffix("/checkpoint/").rpartition(":")
        )
        address = (host.strip("[]"), int(port))
        path = f"/checkpoint/{step}/full"
        with (
            signed_request(
                address, self.find_secret, "GET", path, timeout_s=timeout.total_seconds()
            ) as (response, secret, signature),
            warnings.catch_warnings(),
        ):
            if response.status != 200:
                raise OSError(f"{host}:{port} has no weights of step {step}")
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            stream: Any = SignedStream(response, secret, signature)
            state = _streaming_load(stream, weights_only=True)
            expected = stream.mac.hexdigest()
            if not is_same(response.read(DIGEST).decode("latin-1"), expected):
                raise WrongSecret(f"{host}:{port} sent weights that are not signed")
            return state


def finish_on_gpu() -> None:
    """Wait for all that was begun on the GPU: torchft copies in streams that wait for no other."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
