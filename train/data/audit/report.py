"""Entry point: what is in the prepared shards, before anything is trained on them.

    python -m train.data.audit.report           a screen of it, and all of it in DATA_DIR/report.json

For each source: documents, tokens, lengths, exact copies, and the evaluation tasks that it shares
text with (contamination.py).

Two documents are copies if their tokens are equal. 64-bit hashes decide that: among 10^8 documents,
two others agree with a probability of 0.03%.
"""

import itertools
import json
import logging
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np

from record.durable import write_whole
from settings import load_config
from settings.config import Config
from train.console import start_logging
from train.data import prepare
from train.data.audit.contamination import RunTable, read_tasks
from train.data.audit.scan import Documents, Source, read_source
from train.data.manifest import SPLITS, DataError

log = logging.getLogger(__name__)

QUANTILES = {"min": 0, "10%": 10, "median": 50, "90%": 90, "99%": 99, "max": 100}
COLUMNS = 80
MOST_WARNINGS = 5  # that are shown; report.json has all
MEANS_NOTHING = 0.1  # share of a task's questions

Report = dict[str, Any]


def make_report(config: Config) -> Report:
    """Return all of the report, as it is written to report.json. Raises SettingsError, DataError."""
    tasks = read_tasks(config.core_bundle, prepare.data_dir(config))
    vocabulary = prepare.vocabulary(config)
    table = RunTable(tasks)
    sources = {
        name: read_source(vocabulary, shards, table)
        for name, shards in prepare.open_sources(config, vocabulary).items()
    }
    report: Report = {
        "schema": 2,
        "mixture": config.mixture,
        "tokenizer_sha256": vocabulary.sha256,
        "sources": {name: describe_source(source) for name, source in sources.items()},
        "in_two_sources": compare_sources(sources),
        "compared": {},
    }
    for name, source in sources.items():
        report["compared"][name] = {
            "tokens": source.compared_tokens,
            "of_tokens": source.tokens,
            "tasks": {task.name: table.count_shared(task, source.is_found) for task in tasks},
        }
    report["warnings"] = list_warnings(report)
    return report


def describe_source(source: Source) -> Report:
    """Return the part of the report on one source, without what it shares with others."""
    train, validation = (source.documents[split].hashes for split in SPLITS)
    return {
        "folder": str(source.shards.folder),
        "splits": {split: describe_split(source.documents[split]) for split in SPLITS},
        "validation_in_train": int(np.isin(validation, train).sum()),
    }


def describe_split(documents: Documents) -> Report:
    """Count documents, tokens, lengths, and the documents that are equal to an earlier one."""
    hashes, lengths = documents
    _, firsts = np.unique(hashes, return_index=True)
    is_copy = np.ones(len(hashes), dtype=bool)
    is_copy[firsts] = False
    tokens = int(lengths.sum())
    copied_tokens = int(lengths[is_copy].sum())
    quantiles = np.percentile(lengths, list(QUANTILES.values()), method="inverted_cdf")
    return {
        "documents": len(hashes),
        "tokens": tokens,
        "copies": {
            "documents": int(is_copy.sum()),
            "tokens": copied_tokens,
            "token_share": copied_tokens / tokens,
        },
        "lengths": dict(zip(QUANTILES, quantiles.tolist(), strict=True)),
    }


def compare_sources(sources: dict[str, Source]) -> list[Report]:
    """List pairs of sources with equal documents, and how many of each are in the other."""
    hashes = {
        name: np.concatenate([source.documents[split].hashes for split in SPLITS])
        for name, source in sources.items()
    }
    pairs = []
    for one, other in itertools.combinations(hashes, 2):
        there = int(np.isin(hashes[one], hashes[other]).sum())
        back = int(np.isin(hashes[other], hashes[one]).sum())
        if there:
            pairs.append({"sources": [one, other], "documents": [there, back]})
    return pairs


# ---- The screen


def list_warnings(report: Report) -> list[str]:
    """List what a reader should not miss, a sentence each, the worst overlap first."""
    shared = []
    for name, compared in report["compared"].items():
        for task, counts in compared["tasks"].items():
            share = counts["rows_touched"] / counts["rows"]
            if share:
                shared.append((share, describe_shared(name, compared, task, counts)))
    shared.sort(key=lambda item: -item[0])
    warnings = [sentence for _, sentence in shared]
    for name, source in report["sources"].items():
        copied = source["validation_in_train"]
        if copied:
            held_out = source["splits"]["validation"]["documents"]
            warnings.append(
                f"{name}: {copied:,} of {held_out:,} validation documents are equal to one in "
                "train. The validation loss is too low."
            )
    for pair in report["in_two_sources"]:
        one, other = pair["sources"]
        there, back = pair["documents"]
        warnings.append(
            f"{one} and {other} share documents: {there:,} of {one} are in {other}, {back:,} of "
            f"{other} in {one}. They are trained on for both weights."
        )
    return warnings


def describe_shared(name: str, compared: Report, task: str, counts: Report) -> str:
    """Say what it means that a source has text of a task."""
    share = counts["rows_touched"] / counts["rows"]
    at_least = "" if compared["tokens"] == compared["of_tokens"] else "at least "
    if share >= MEANS_NOTHING:
        meaning = "Results on it mean nothing."
    else:
        meaning = f"Results on it may be {at_least}{100 * share:.2g} points too high."
    questions = f"{at_least}{counts['rows_touched']:,} of {counts['rows']:,} questions of {task}"
    return f"{name} shares 13-grams with {questions}. {meaning}"


def render(report: Report) -> Iterator[str]:
    """Write the report as lines of 80 columns."""
    sources = report["sources"]
    yield f"{'Source':25}{'documents':>12}{'tokens':>16}{'copies':>11}"
    for name, source in sources.items():
        for split, counts in source["splits"].items():
            size = f"{counts['documents']:>12,}{counts['tokens']:>16,}"
            yield f"{name[:13]:14}{split:11}{size}{counts['copies']['token_share']:>11.2%}"
    yield "Copies: share of the tokens. The first document of its kind is not counted."
    yield ""
    yield f"{'Tokens per document':25}" + "".join(f"{heading:>9}" for heading in QUANTILES)
    for name, source in sources.items():
        lengths = source["splits"]["train"]["lengths"]
        yield f"{name[:24]:25}" + "".join(f"{length:>9,}" for length in lengths.values())
    yield ""
    yield from render_compared(report["compared"])
    yield ""
    warnings = report["warnings"]
    if not warnings:
        yield "No warnings."
        return
    cut = ""
    if len(warnings) > MOST_WARNINGS:
        cut = f" ({MOST_WARNINGS} of {len(warnings):,})"
    yield f"Warnings{cut}"
    for warning in warnings[:MOST_WARNINGS]:
        yield from textwrap.wrap(
            warning,
            COLUMNS,
            initial_indent="  - ",
            subsequent_indent="    ",
            max_lines=2,
            placeholder=" ...",
        )


def render_compared(compared: Report) -> Iterator[str]:
    """Write how many tasks were compared with how much text."""
    tasks = set()
    shared = set()
    tokens = 0
    of_tokens = 0
    for source in compared.values():
        tokens += source["tokens"]
        of_tokens += source["of_tokens"]
        for task, counts in source["tasks"].items():
            tasks.add(task)
            if counts["rows_touched"]:
                shared.add(task)
    if not tasks:
        yield "Evaluation tasks: none compared. Try: make data-report CORE_BUNDLE=path/to/tasks"
        return
    yield f"Evaluation tasks: {len(tasks):,} compared, {len(shared):,} with 13-grams in a source"
    if tokens < of_tokens:
        yield f"Compared with tasks: {tokens:,} of {of_tokens:,} tokens"


def write_report(config: Config) -> None:
    """Write the report, and print a screen of it. Raises SettingsError, DataError."""
    report = make_report(config)
    path = prepare.data_dir(config) / "report.json"
    try:
        write_whole(path, json.dumps(report, indent=1).encode())
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror}); make room, or choose another folder with "
            "DATA_DIR"
        ) from error
    for line in render(report):
        log.info("%s", line)
    log.info("All figures and examples: %s", path)


def main() -> int:
    start_logging()
    return prepare.exit_code(lambda: write_report(load_config()))


if __name__ == "__main__":
    sys.exit(main())
