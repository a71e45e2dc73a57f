"""The tasks of a bundle and their examples, in an order that others have too.

    core.yaml            label, file, shots, kind and delimiter of each task
    eval_meta_data.csv   what guessing scores, in percent
    eval_data/FILE       an example a line:  multiple_choice     {"query", "choices", "gold"}
                                             schema              {"context_options", "continuation", "gold"}
                                             language_modeling   {"context", "continuation"}

Examples are shuffled with a fixed seed, and the shots of an example are drawn with a seed of its
place in that order. Both are nanochat's, so that a task's score is that of others. A part of a task
is chosen by hashes, and asked exactly as it is in the whole.
"""

import csv
import dataclasses
import hashlib
import io
import json
import random
from collections.abc import Sequence
from typing import Any

import yaml

from train.data.sources.source import CorpusError

# The metric is the mean over these and no others (DCLM, arXiv 2406.11794; the labels of its core.yaml).
CORE_TASKS = (
    "hellaswag_zeroshot",
    "jeopardy",
    "bigbench_qa_wikidata",
    "arc_easy",
    "arc_challenge",
    "copa",
    "commonsense_qa",
    "piqa",
    "openbook_qa",
    "lambada_openai",
    "hellaswag",
    "winograd",
    "winogrande",
    "bigbench_dyck_languages",
    "agi_eval_lsat_ar",
    "bigbench_cs_algorithms",
    "bigbench_operators",
    "bigbench_repeat_copy_logic",
    "squad",
    "coqa",
    "boolq",
    "bigbench_language_identification",
)
CHOICE, SCHEMA, LANGUAGE = KINDS = ("multiple_choice", "schema", "language_modeling")
ORDER_SEED, SHOTS_SEED = 1337, 1234  # nanochat's, scripts/base_eval.py and nanochat/core_eval.py
Example = dict[str, Any]


class CoreError(CorpusError):
    """A bundle that is missing or cannot be used. The message names the remedy."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        kind: one of KINDS.
        file: in eval_data/.
        shots: solved examples that each question is shown after.
        delimiter: between a question and its answer.
        baseline: what guessing scores, from 0 to 1.
    """

    label: str
    kind: str
    file: str
    shots: int
    delimiter: str
    baseline: float

    def centred(self, accuracy: float) -> float:
        """Return 0 for guessing, 1 for all right."""
        return (accuracy - self.baseline) / (1 - self.baseline)


def read_tasks(core_yaml: bytes, meta_csv: bytes, where: str) -> list[Task]:
    """Read the tasks that a bundle declares. Raises CoreError."""
    try:
        rows = csv.DictReader(io.StringIO(meta_csv.decode("utf-8-sig")))
        baselines = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in rows}
    except (KeyError, ValueError, TypeError) as error:
        raise CoreError(
            f"{where}: eval_meta_data.csv needs the columns Eval Task and Random baseline, in percent "
            f"({type(error).__name__}: {error})"
        ) from None
    try:
        declared = yaml.safe_load(core_yaml)["icl_tasks"]
        tasks = [task_of(entry, baselines) for entry in declared]
    except (yaml.YAMLError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise CoreError(
            f"{where}: core.yaml is no list icl_tasks of label, dataset_uri, num_fewshot and icl_task_type "
            f"({type(error).__name__}: {error})"
        ) from None
    labels = [task.label for task in tasks]
    if not labels:
        raise CoreError(f"{where}: core.yaml has no task")
    for label in labels:
        if labels.count(label) > 1:
            raise CoreError(f"{where}: core.yaml has the label {label} twice")
    return tasks


def task_of(entry: dict[str, Any], baselines: dict[str, float]) -> Task:
    """Read a task of core.yaml. Raises KeyError, TypeError, ValueError, IndexError."""
    label = entry["label"]
    kind = entry["icl_task_type"]
    if kind not in KINDS:
        raise ValueError(f"{label}: icl_task_type {kind} is none of {', '.join(KINDS)}")
    if label not in baselines:
        raise ValueError(f"{label}: eval_meta_data.csv has no random baseline of it")
    if not 0 <= baselines[label] < 1:
        raise ValueError(f"{label}: a random baseline of {100 * baselines[label]:g} percent")
    shots = entry["num_fewshot"][0]
    if type(shots) is not int or shots < 0:
        raise ValueError(f"{label}: num_fewshot {shots!r}")
    delimiter = entry.get("continuation_delimiter", " ")
    if not isinstance(delimiter, str):
        raise TypeError(f"{label}: continuation_delimiter {delimiter!r}")
    return Task(
        label=label,
        kind=kind,
        file=entry["dataset_uri"],
        shots=shots,
        delimiter=delimiter,
        baseline=baselines[label],
    )


def read_examples(task: Task, content: bytes) -> list[Example]:
    """Read the examples of a task's file, in the order in which they are asked. Raises CoreError."""
    examples = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
            check_example(task, example)
            examples.append(example)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CoreError(
                f"{task.file} ({len(content)} bytes) line {number} is no example of {task.kind} "
                f"({type(error).__name__}: {error}); it begins {line[:60]!r}"
            ) from None
    if 0 < len(examples) <= task.shots:
        raise CoreError(
            f"{task.file} has {len(examples)} examples. {task.label} needs more than {task.shots}: "
            "each question takes that number of others as shots"
        )
    random.Random(ORDER_SEED).shuffle(examples)
    return examples


def check_example(task: Task, example: Example) -> None:
    """Raise ValueError, KeyError, TypeError or AttributeError unless this is an example of the task's kind."""
    pairs = list_pairs(task, example)
    if task.kind != LANGUAGE:
        gold = example["gold"]
        if type(gold) is not int or len(pairs) < 2 or not 0 <= gold < len(pairs):
            raise ValueError(f"gold {gold!r} of {len(pairs)} options")
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise TypeError("a text is no string")
    if task.kind != CHOICE and not pairs[0][1].strip():
        raise ValueError("nothing to continue with")


def list_pairs(task: Task, example: Example) -> list[tuple[str, str]]:
    """List the question and the answer of each choice; in language_modeling there is one."""
    if task.kind == CHOICE:
        return [(example["query"], choice) for choice in example["choices"]]
    if task.kind == SCHEMA:
        return [(context, example["continuation"]) for context in example["context_options"]]
    return [(example["context"].strip(), example["continuation"])]


def gold_of(example: Example) -> int:
    """Return which choice is right."""
    return int(example.get("gold", 0))


def shots_of(task: Task, examples: Sequence[Example], number: int) -> list[Example]:
    """Draw the solved examples that are shown before example `number`, never itself."""
    if not task.shots:
        return []
    others = [i for i in range(len(examples)) if i != number]
    return [examples[i] for i in random.Random(SHOTS_SEED + number).sample(others, task.shots)]


def chosen(task: Task, count: int, most: int) -> list[int]:
    """Choose which of `count` examples are asked: at most `most` (0: all), always the same."""
    if not most or most >= count:
        return list(range(count))

    def hash_of(number: int) -> bytes:
        return hashlib.sha256(f"{ORDER_SEED} {task.file} {number}".encode()).digest()

    return sorted(sorted(range(count), key=hash_of)[:most])
