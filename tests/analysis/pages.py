"""A page read back: what analysis/page/page_data.py put into it, by a reader that shares no code with the writer's."""

import base64
import itertools
import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any


def page_of(path: Path) -> dict[str, Any]:
    """What the page knows; each run with `columns`: key -> values, None where nothing is known."""
    text = path.read_text("utf-8")
    known = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    data: dict[str, Any] = json.loads(known[1])
    packed = zlib.decompress(
        base64.b64decode(re.search(r'id="numbers">(.*?)</script>', text, re.S)[1])
    )
    for run in data["runs"]:
        run["columns"] = columns_of(run["heads"], packed)
        if run["sampled"]:
            run["sampled"]["columns"] = columns_of(run["sampled"]["heads"], packed)
    return data


def columns_of(heads: dict[str, Any], packed: bytes) -> dict[str, list[float | None]]:
    found: dict[str, list[float | None]] = {}
    for key, head in heads.items():  # a column stands behind the one that tells it
        n, width, at = head["n"], head["width"], head["at"]
        whole = [
            int.from_bytes(packed[at + i : at + n * width : n], "little", signed=True)
            for i in range(n)
        ]
        for _ in range(head["order"]):
            whole = list(itertools.accumulate(whole))
        whole = [(w + 2**63) % 2**64 - 2**63 for w in whole]
        values = of_form(head, whole, found)
        gaps = (
            [bool(packed[head["gaps"] + i // 8] >> i % 8 & 1) for i in range(n)]
            if "gaps" in head
            else [False] * n
        )
        found[key] = [None if gap else value for gap, value in zip(gaps, values, strict=True)]
    return found


def of_form(
    head: dict[str, Any], whole: list[int], others: dict[str, list[float | None]]
) -> list[float]:
    form = head["form"]
    if form == "decimal":
        return [w / 10 ** head["decimals"] for w in whole]
    if form in ("float32", "float64"):
        size, letter = (4, "<f") if form == "float32" else (8, "<d")
        return [
            struct.unpack(letter, (w % 2 ** (8 * size)).to_bytes(size, "little"))[0] for w in whole
        ]
    other = [0.0 if value is None else value for value in others[head["from"]]]
    told = {
        "sum": lambda: [s / head["constant"] for s in itertools.accumulate(other)],
        "over": lambda: [head["constant"] / value if value else 0.0 for value in other],
        "times": lambda: [value * head["constant"] for value in other],
    }[form]()
    return [
        struct.unpack("<d", struct.pack("<q", struct.unpack("<q", struct.pack("<d", t))[0] + w))[0]
        for t, w in zip(told, whole, strict=True)
    ]
