"""Reading the few objects that kubectl sends as protocol buffers: questions about rights, and secrets.

What it makes from files is sent as JSON or YAML; what its own generators make, and kubectl auth, is not. Only the
fields that are read here have numbers here, from Kubernetes' generated.proto files.
"""

import base64
from collections.abc import Iterator
from typing import Any

MAGIC = b"k8s\x00"
MEDIA_TYPE = "application/vnd.kubernetes.protobuf"
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next thing begins."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not data[at - 1] & 0x80:
            return value, at


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a message."""
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        if tag & 7 == VARINT:
            value, at = varint(data, at)
            yield tag >> 3, value
        else:
            length = {FIXED64: 8, FIXED32: 4}.get(tag & 7)
            if length is None:
                length, at = varint(data, at)
            yield tag >> 3, data[at : at + length]
            at += length


def texts(data: bytes, names: dict[int, str]) -> dict[str, str]:
    """The named fields of a message that hold text."""
    return {
        names[number]: value.decode() for number, value in fields(data) if number in names and value
    }


def mapping(data: bytes, number: int) -> dict[str, bytes]:
    """A map of text to bytes."""
    pairs = [dict(fields(value)) for n, value in fields(data) if n == number]
    return {pair[1].decode(): pair.get(2, b"") for pair in pairs}


def decoded(body: bytes) -> dict[str, Any] | None:
    """The object, as JSON would have it; None: not one of those that are known here."""
    envelope = dict(fields(body.removeprefix(MAGIC)))
    thing: dict[str, Any] = texts(envelope[1], {1: "apiVersion", 2: "kind"})
    raw = envelope.get(2, b"")
    parts = dict(fields(raw))
    thing["metadata"] = texts(parts.get(1, b""), {1: "name", 3: "namespace"})
    if thing["kind"] == "SelfSubjectAccessReview":
        about = dict(fields(parts.get(2, b"")))
        names = dict(
            enumerate(
                ("namespace", "verb", "group", "version", "resource", "subresource", "name"), 1
            )
        )
        thing["spec"] = (
            {"resourceAttributes": texts(about[1], names)}
            if 1 in about
            else {"nonResourceAttributes": texts(about[2], {1: "path", 2: "verb"})}
        )
    elif thing["kind"] == "SelfSubjectRulesReview":
        thing["spec"] = texts(parts.get(2, b""), {1: "namespace"})
    elif thing["kind"] == "Secret":
        for number, name in ((11, "labels"), (12, "annotations")):
            found = mapping(parts.get(1, b""), number)
            if found:
                thing["metadata"][name] = {key: value.decode() for key, value in found.items()}
        thing["data"] = {
            key: base64.b64encode(value).decode() for key, value in mapping(raw, 2).items()
        }
        if parts.get(3):
            thing["type"] = parts[3].decode()
    else:
        return None
    return thing
