"""A small bundle of CORE tasks for tests: one of each kind, in nanochat's layout."""

import json
import zipfile
from pathlib import Path
from typing import Any

import yaml

WORDS = [
    "abcd",
    "efgh",
    "aabb",
    "ccdd",
    "hgfe",
    "dcba",
    "bdfh",
    "aceg",
    "abba",
    "cddc",
    "effe",
    "ghhg",
]
ANSWER = {"continuation_delimiter": "\nAnswer: "}
# Label -> file, kind, shots, what else is declared, what guessing scores.
TASKS: dict[str, tuple[str, str, int, dict[str, str], int]] = {
    "copa": ("commonsense_reasoning/copa.jsonl", "multiple_choice", 0, {}, 50),
    "piqa": ("commonsense_reasoning/piqa.jsonl", "multiple_choice", 2, ANSWER, 50),
    "winograd": ("language_understanding/winograd.jsonl", "schema", 0, {}, 50),
    "jeopardy": ("world_knowledge/jeopardy.jsonl", "language_modeling", 3, ANSWER, 0),
}


def text(seed: int, count: int) -> str:
    return " ".join(WORDS[(seed * 7 + i * (seed % 5 + 1)) % len(WORDS)] for i in range(count))


def example(kind: str, i: int) -> dict[str, Any]:
    """Return example i of a kind. All differ, and texts grow with i. Some choices differ in length."""
    if kind == "multiple_choice":
        choices = [text(i + 20, 1 + i % 3), text(i + 41, 2), text(i + 62, 1)]
        return {"query": text(i, 2 + i), "choices": choices, "gold": i % 3}
    if kind == "schema":
        options = [
            f"{text(i, 2)} {WORDS[i % 12]}",
            f"{text(i, 2)} {WORDS[(i + 5) % 12]} abcd",
        ]
        return {"context_options": options, "continuation": text(i + 30, 2), "gold": i % 2}
    return {"context": f" {text(i, 3)} ", "continuation": text(i + 50, 1 + i % 2)}


def lines(*entries: Any) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


def files(labels: tuple[str, ...] = tuple(TASKS)) -> dict[str, bytes]:
    """Name -> content; the files of tasks beyond `labels` are left out."""
    declared = []
    baselines = "Eval Task,Random baseline\n"
    made = {}
    for label, (file, kind, shots, more, baseline) in TASKS.items():
        entry = {"label": label, "dataset_uri": file, "num_fewshot": [shots]}
        declared.append(entry | {"icl_task_type": kind} | more)
        baselines += f"{label},{baseline}\n"
        if label in labels:
            made[f"eval_data/{file}"] = lines(*(example(kind, i) for i in range(12)))
    core_yaml = yaml.safe_dump({"icl_tasks": declared}).encode()
    return made | {"core.yaml": core_yaml, "eval_meta_data.csv": baselines.encode()}


def make_folder(folder: Path, content: dict[str, bytes] | None = None) -> Path:
    for name, one in (content or files()).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(one)
    return folder


def make_zip(
    path: Path, content: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED
) -> Path:
    """As nanochat's is: all in a folder eval_bundle."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, one in (content or files()).items():
            archive.writestr(f"eval_bundle/{name}", one)
    return path
