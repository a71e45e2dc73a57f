"""Reading back what W&B wrote into a run folder: its transaction log, with its own message classes.

The file is a LevelDB log behind a header of seven bytes: blocks of 32 KiB hold pieces of records, each piece
behind a checksum (4 bytes), a length (2) and a type (1 whole; 2, 3, 4 the first, a middle, the last of several).
"""

import json
import struct
from pathlib import Path
from typing import Any

BLOCK, HEADER, PIECE = 32768, 7, 7


def messages(path: Path) -> list[Any]:
    """The messages of a .wandb file, in order."""
    from wandb.proto import wandb_internal_pb2

    content, found, whole, at = path.read_bytes(), [], b"", HEADER
    assert content[:4] == b":W&B", content[:HEADER]
    while at + PIECE <= len(content):
        if BLOCK - at % BLOCK < PIECE:  # too little left in the block for a piece
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + PIECE])
        if kind == 0:
            break
        whole += content[at + PIECE : at + PIECE + length]
        at += PIECE + length
        if kind in (1, 4):
            message = wandb_internal_pb2.Record()
            message.ParseFromString(whole)
            found.append(message)
            whole = b""
    return found


def files(run: Path) -> list[Path]:
    """The .wandb files of a run, oldest first."""
    return sorted((run / "wandb").glob("*run-*/*.wandb"))


def folders(run: Path) -> list[Path]:
    """The folders of those files."""
    return [path.parent for path in files(run)]


def rows(run: Path) -> list[dict[str, Any]]:
    """The history of a run, all its files together, each row with its _step."""
    found = []
    for path in files(run):
        for message in messages(path):
            if message.WhichOneof("record_type") == "history":
                row = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json)
                    for item in message.history.item
                }
                found.append(row | {"_step": message.history.step.num})
    return found
