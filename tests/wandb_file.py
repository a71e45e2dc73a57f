"""Reading back what W&B wrote into a run folder: its transaction log, with its own message classes.

The file is a LevelDB log behind a header of seven bytes. Blocks of 32 KiB hold pieces of messages. Each piece is
preceded by a checksum (4 bytes), a length (2) and a type (1 whole; 2, 3, 4 the first, a middle, the last of several).
"""

import json
import struct
from pathlib import Path
from typing import Any

BLOCK = 32768
HEADER = 7


def list_files(run: Path) -> list[Path]:
    """Return the .wandb files of a run, oldest first."""
    return sorted((run / "wandb").glob("*run-*/*.wandb"))


def read_messages(path: Path) -> list[Any]:
    """Return the messages of a .wandb file, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    messages = []
    whole = b""
    for start in range(0, len(content), BLOCK):
        block = content[start : start + BLOCK]
        if start == 0:
            block = block[HEADER:]
        while len(block) > HEADER:
            _, length, kind = struct.unpack_from("<IHB", block)
            whole += block[HEADER : HEADER + length]
            block = block[HEADER + length :]
            if kind in (1, 4):
                messages.append(Record.FromString(whole))
                whole = b""
    return messages


def read_rows(run: Path) -> list[dict[str, Any]]:
    """Return the history of a run, all its files together, each row with its _step."""
    rows = []
    for path in list_files(run):
        for message in read_messages(path):
            if message.WhichOneof("record_type") == "history":
                row = {"_step": message.history.step.num}
                for item in message.history.item:
                    name = item.key or item.nested_key[0]
                    row[name] = json.loads(item.value_json)
                rows.append(row)
    return rows
