"""Weights and optimizer state for a site that was away, over HTTP, signed by both sides.

torchft's transport serves whoever asks, on an address that other machines may not know, and reads
pickles. Here the request and the stream are signed (distributed/signed_http.py), and what arrives
is read as tensors only. The signature of the stream follows it: nothing of it is used before that.
"""

import datetime
import hmac
import threading
import warnings
from typing import Any

from torchft.checkpointing._serialization import _streaming_load, _streaming_save
from torchft.checkpointing.transport import CheckpointTransport

from settings.addresses import join_address, split_address
from train.distributed.signed_http import (
    FindSecret,
    Requests,
    SignedServer,
    WrongSecret,
    is_same,
    listen,
    signed_request,
)

DIGEST = 64  # characters of a signature
NOTHING = (-1, None)  # of no step


class SignedStream:
    """A file that is read or written, and the signature of what went through."""

    def __init__(self, file: Any, secret: str, signature: str):
        self.file = file
        self.mac = hmac.new(secret.encode(), signature.encode(), "sha256")

    def write(self, data: bytes) -> int:
        return int(self.file.write(self.sign(data)))

    def read(self, size: int) -> bytes:
        return self.sign(self.file.read(size))

    def readline(self) -> bytes:
        return self.sign(self.file.readline())

    def sign(self, data: bytes) -> bytes:
        self.mac.update(data)
        return data


class WeightRequests(Requests):
    """Requests for the weights of a step."""

    weights: "WeightServer"  # of the server

    def respond(self, body: bytes) -> None:
        weights = self.weights
        self.connection.settimeout(weights.timeout_s)
        weights.are_there.wait(weights.timeout_s)
        step, state = weights.offer
        if self.path != f"/weights/{step}":
            self.answer(404)
            return
        self.send_response(200)
        self.end_headers()
        stream: Any = SignedStream(self.wfile, self.secret, self.signature)
        _streaming_save(state, stream)
        self.wfile.write(stream.mac.hexdigest().encode())


class WeightServer(CheckpointTransport[Any]):
    """What torchft's manager sends and receives weights by.

    Args:
        address: of this site, by which the others know it.
        timeout_s: for a request to wait until there is something to fetch, and for each read.
    """

    def __init__(self, address: str, find_secret: FindSecret, timeout_s: float):
        self.find_secret = find_secret
        self.timeout_s = timeout_s
        self.are_there = threading.Event()
        self.offer: tuple[int, Any] = NOTHING
        requests = type("RequestsHere", (WeightRequests,), {"weights": self})
        self.server = SignedServer(listen(address, 0), requests, find_secret)
        self.where = join_address(address, self.server.socket.getsockname()[1])

    def metadata(self) -> str:
        """Return host:port, which torchft gives to a site that is behind."""
        return self.where

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: datetime.timedelta
    ) -> None:
        """Serve a copy of a site's state, in host memory, to those that ask for this step."""
        self.offer = (step, state_dict)
        self.are_there.set()

    def disallow_checkpoint(self) -> None:
        """Forget, after a sync, what is several times as large as the model."""
        self.are_there.clear()
        self.offer = NOTHING

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: datetime.timedelta
    ) -> Any:
        """Fetch the weights of a step. Raises OSError or WrongSecret, which torchft reports."""
        address = split_address(metadata, 0)
        path = f"/weights/{step}"
        request = signed_request(
            address, self.find_secret, "GET", path, timeout_s=timeout.total_seconds()
        )
        with request as (response, secret, signature), warnings.catch_warnings():
            if response.status != 200:
                raise OSError(f"{metadata} has no weights of step {step}")
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            stream: Any = SignedStream(response, secret, signature)
            state = _streaming_load(stream, weights_only=True)
            if not is_same(response.read(DIGEST).decode("latin-1"), stream.mac.hexdigest()):
                raise WrongSecret(f"{metadata} sent weights that are not signed")
            return state

    def shutdown(self, wait: bool = True) -> None:
        self.server.shutdown()
        self.server.server_close()
