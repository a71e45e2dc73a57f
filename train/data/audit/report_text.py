"""The report of report.py for a terminal of 80 columns, and its warnings."""

import textwrap
from collections.abc import Iterator
from typing import Any

from record.durable import make_printable

COLUMNS = 80
MOST_WARNINGS = 5  # that are shown; report.json has all
SEQUENCES = 2
MEANS_NOTHING = 0.1  # share of a task's questions
MANY_NEAR = 0.05  # share of the training tokens
SHOWN_QUANTILES = {"0": "min", "10": "10%", "50": "median", "90": "90%", "99": "99%", "100": "max"}

Report = dict[str, Any]


def list_warnings(report: Report) -> list[str]:
    """List what a reader should not miss, a sentence each."""
    shared = []
    for name, compared in report["compared"].items():
        for task, counts in compared["tasks"].items():
            share = counts["rows_touched"] / counts["rows"]
            if share:
                shared.append((share, describe_shared(name, compared, task, counts)))
    shared.sort(key=lambda item: -item[0])
    warnings = [sentence for _, sentence in shared]
    for name, source in report["sources"].items():
        copied = max(source["validation_in_train"], source["validation_near_train"])
        if copied:
            held_out = source["splits"]["validation"]["documents"]
            warnings.append(
                f"{name}: {copied:,} of {held_out:,} validation documents are equal to one in train, "
                "or nearly so. The validation loss is too low."
            )
        if source["splits"]["train"]["near_duplicates"]["token_share"] >= MANY_NEAR:
            warnings.append(
                f"{name}: Near-duplicates are repeated text. To leave them out: make data "
                "NEAR_DUPLICATES=drop"
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
    """Write the report as lines."""
    sources = report["sources"]
    yield from render_sources(sources)
    yield ""
    yield from render_compared(report)
    yield ""
    name, source = next(iter(sources.items()))
    yield f"Random sequences of {name}"
    for sequence in source["splits"]["train"]["windows"][:SEQUENCES]:
        yield from wrap(make_printable(sequence["text"][: 2 * COLUMNS]), "  | ")
    yield ""
    warnings = report["warnings"]
    is_cut = len(warnings) > MOST_WARNINGS
    shown = f"Warnings ({MOST_WARNINGS} of {len(warnings):,})" if is_cut else "Warnings"
    yield shown if warnings else "No warnings."
    for warning in warnings[:MOST_WARNINGS]:
        yield from wrap(warning, "  - ")


def render_sources(sources: Report) -> Iterator[str]:
    """Write counts, lengths and dropped rows of sources."""
    yield f"{'Source':25}{'documents':>12}{'tokens':>16}{'duplicates':>11}{'near-duplicates':>16}"
    for name, source in sources.items():
        for split, counts in source["splits"].items():
            equal = counts["duplicates"]["token_share"]
            near = counts["near_duplicates"]["token_share"]
            size = f"{counts['documents']:>12,}{counts['tokens']:>16,}"
            yield f"{name[:13]:14}{split:11}{size}{equal:>11.2%}{near:>16.2%}"
    yield "Duplicates: share of the tokens. The first document of its kind is not counted."
    yield ""
    headings = "".join(f"{heading:>9}" for heading in SHOWN_QUANTILES.values())
    yield f"{'Tokens per document':25}{headings}"
    for name, source in sources.items():
        lengths = source["splits"]["train"]["length_quantiles"]
        yield f"{name[:24]:25}" + "".join(f"{lengths[key]:>9,}" for key in SHOWN_QUANTILES)
    yield ""
    for name, source in sources.items():
        counts = source["dropped"]
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)
        total = f"{sum(counts.values()):,} of {source['documents_read']:,}"
        yield f"Dropped rows of {name}: {total} ({reasons or 'none'})"[:COLUMNS]


def render_compared(report: Report) -> Iterator[str]:
    """Write how much was compared."""
    shared = [
        counts["rows_touched"] > 0
        for compared in report["compared"].values()
        for counts in compared["tasks"].values()
    ]
    if shared:
        found = f"{sum(shared):,} with 13-grams that are in a source"
        yield f"Evaluation tasks: {len(report['tasks']):,} compared, {found}"
    else:
        yield "Evaluation tasks: none compared. Try: make data-report CORE_BUNDLE=path/to/tasks"
    tokens, of_tokens = (
        sum(compared[key] for compared in report["compared"].values())
        for key in ("tokens", "of_tokens")
    )
    if tokens < of_tokens:
        yield f"Compared with tasks and each other: {tokens:,} of {of_tokens:,} tokens"


def wrap(text: str, first: str) -> list[str]:
    """Wrap a text to two lines. first: what stands before it on the first one."""
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        max_lines=2,
        placeholder=" ...",
    )
