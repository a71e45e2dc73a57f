"""A log file in blocks of whole lines: unpacked, in UTF-8, without colours, with one kind of line end."""

import codecs
import gzip
import re
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

BLOCK = 1 << 20
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # what PowerShell writes behind `>`
LONGEST_LINE = 4 << 20  # a longer one is left out
ESCAPE = re.compile(rb"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07\n]*\x07)")
COLOUR = re.compile(
    rb"\[[0-9]{1,3}(?:;[0-9]{1,3})*m"
)  # of which a logger or a paste has lost the escape


def without_colours(text: bytes) -> bytes:
    return COLOUR.sub(b"", ESCAPE.sub(b"", text) if b"\x1b" in text else text)


class Blocks:
    """The blocks of a file, and what there is to say about it when all have been taken.

    Behind the last block: `cut`, the last line where it has no line end; `too_long`, lines left out; `damage`, why a
    packed file ends early.
    """

    def __init__(self, path: Path):
        self.path = path
        self.cut = b""
        self.too_long = 0
        self.damage = ""

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        with self.opened() as file:
            for block in self.read(file):
                if rest.endswith(b"\r"):  # its line feed may be in this block
                    rest, block = rest[:-1], b"\r" + block
                held = b"\r" if block.endswith(b"\r") else b""
                block = (
                    block[: len(block) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
                )
                whole, line_end, tail = block.rpartition(b"\n")
                if not line_end:
                    rest += block + held
                    if len(rest) > LONGEST_LINE:
                        self.too_long, rest = self.too_long + 1, b""
                    continue
                yield without_colours(rest + whole + line_end)
                rest = tail + held
        if rest.endswith(b"\r"):
            yield without_colours(rest[:-1] + b"\n")
        else:
            self.cut = without_colours(rest)

    def opened(self) -> gzip.GzipFile | BufferedReader:
        with open(self.path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        return gzip.GzipFile(self.path) if packed else open(self.path, "rb")

    def read(self, file: gzip.GzipFile | BufferedReader) -> Iterator[bytes]:
        try:
            decoder = (
                codecs.getincrementaldecoder("utf-16")("replace")
                if file.peek(2)[:2] in UTF_16
                else None
            )
            # read1, since read would throw away what it has unpacked before a damage
            while (
                block := file.read1(BLOCK) if isinstance(file, gzip.GzipFile) else file.read(BLOCK)
            ):
                yield decoder.decode(block).encode() if decoder else block
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.damage = f"the packed file ends early or is damaged ({error}); what could be unpacked was read"
