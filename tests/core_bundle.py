"""A small bundle of CORE tasks for tests: one of each kind, in nanochat's layout."""

import json
import zipfile
from pathlib import Path

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
TASKS = {
    "copa": ("commonsense_reasoning/copa.jsonl", "multiple_choice", 0, None, 50),
    "piqa": ("commonsense_reasoning/piqa.jsonl", "multiple_choice", 2, "\nAnswer: ", 50),
    "winograd": ("language_understanding/winograd.jsonl", "schema", 0, None, 50),
    "jeopardy": ("world_knowledge/jeopardy.jsonl", "language_modeling", 3, "\nAnswer: ", 0),
}


def text(seed: int, count: int) -> str:
    return " ".join(WORDS[(seed * 7 + i * (seed % 5 + 1)) % len(WORDS)] for i in range(count))


def examples(label: str, count: int = 12) -> list[dict]:
    """Different ones, of growing length; some choices are of unequal length."""
    if label in ("copa", "piqa"):
        return [
            {
                "query": text(i, 2 + i),
                "choices": [text(i + 20, 1 + i % 3), text(i + 41, 2), text(i + 62, 1)],
                "gold": i % 3,
            }
            for i in range(count)
        ]
    if label == "winograd":
        return [
            {
                "context_options": [
                    f"{text(i, 2)} {WORDS[i % 12]}",
                    f"{text(i, 2)} {WORDS[(i + 5) % 12]} abcd",
                ],
                "continuation": text(i + 30, 2),
                "gold": i % 2,
            }
            for i in range(count)
        ]
    return [
        {"context": f" {text(i, 3)} ", "continuation": text(i + 50, 1 + i % 2)}
        for i in range(count)
    ]


def files(labels: tuple[str, ...] = tuple(TASKS)) -> dict[str, bytes]:
    """Name -> content; the files of tasks beyond `labels` are left out."""
    made = {
        "core.yaml": "icl_tasks:\n"
        + "".join(
            f"-\n  label: {label}\n  dataset_uri: {file}\n  num_fewshot: [{shots}]\n  icl_task_type: {kind}\n"
            + (f"  continuation_delimiter: {json.dumps(delimiter)}\n" if delimiter else "")
            for label, (file, kind, shots, delimiter, _) in TASKS.items()
        ),
        "eval_meta_data.csv": "Eval Task,Random baseline\n"
        + "".join(f"{label},{of[4]}\n" for label, of in TASKS.items()),
    }
    for label in labels:
        made[f"eval_data/{TASKS[label][0]}"] = "".join(
            json.dumps(one) + "\n" for one in examples(label)
        )
    return {name: content.encode() for name, content in made.items()}


def make_folder(folder: Path, content: dict[str, bytes] | None = None) -> Path:
    for name, one in (content or files()).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(one)
    return folder


def make_zip(path: Path, content: dict[str, bytes] | None = None) -> Path:
    """As nanochat's is: all in a folder eval_bundle."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, one in (content or files()).items():
            archive.writestr(zipfile.ZipInfo(f"eval_bundle/{name}"), one)
    return path
