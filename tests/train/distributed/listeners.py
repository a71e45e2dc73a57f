"""What listens: the TCP ports of the processes of a run, as /proc has them."""

import contextlib
import ipaddress
import os
import struct
from pathlib import Path
from typing import NamedTuple

LISTEN = "0A"


class Listener(NamedTuple):
    """A port that a process listens on. program: its module, such as train.main."""

    program: str
    host: str
    port: int


def find_listeners(runs_dir: Path) -> set[Listener]:
    """Return what the processes that were started with this RUNS_DIR listen on."""
    sockets = listening_sockets()
    found = set()
    for process in processes_of(runs_dir):
        with contextlib.suppress(OSError):  # it has ended
            words = (process / "cmdline").read_bytes().decode().split("\0")
            program = words[words.index("-m") + 1] if "-m" in words else Path(words[0]).name
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if address := sockets.get(os.readlink(descriptor)):
                        found.add(Listener(program, *address))
    return found


def processes_of(runs_dir: Path) -> list[Path]:
    """Return the folders in /proc of processes with this RUNS_DIR: torchrun gives each rank a session."""
    setting = f"RUNS_DIR={runs_dir}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if setting in (process / "environ").read_bytes().split(b"\0"):
                found.append(process)
    return found


def listening_sockets() -> dict[str, tuple[str, int]]:
    """Return "socket:[INODE]" -> (address, port) of all sockets that listen."""
    sockets = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):  # without IPv6
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN:
                    sockets[f"socket:[{fields[9]}]"] = parse_address(fields[1])
    return sockets


def parse_address(text: str) -> tuple[str, int]:
    """Parse ADDRESS:PORT in hex, each 32 bits of the address in the machine's byte order."""
    address, port = text.split(":")
    packed = bytes.fromhex(address)
    words = struct.unpack(f">{len(packed) // 4}I", packed)
    host = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    return str(host), int(port, 16)
