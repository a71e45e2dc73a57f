"""The report of report.py as lines for a terminal of 100 columns, and what it warns of."""

from collections.abc import Iterator
from typing import Any

from train.data.audit.overlap import GRAM, SHORTEST

COLUMNS = 100
SHOWN = 300  # characters of a window or of shared text; the JSON has all
MEANS_NOTHING = 0.1  # share of a task's rows


def amount(tokens: int, of: int) -> str:
    """'50.0M of 650.0M tokens'."""
    if of < 10_000_000:
        return f"{tokens:,} of {of:,} tokens"
    return f"{tokens / 1e6:,.1f}M of {of / 1e6:,.1f}M tokens"


def plain(text: str) -> str:
    """The text with whatever is no printing character escaped: a terminal obeys some of those."""
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape").decode() for ch in text)


def folded(text: str, indent: int) -> Iterator[str]:
    """Lines of at most COLUMNS characters, broken at a blank where there is one in the last fifth of a line."""
    width = COLUMNS - indent
    while len(text) > width:
        blank = text.rfind(" ", width * 4 // 5, width + 1)
        yield " " * indent + text[: blank if blank > 0 else width]
        text = text[blank + 1 if blank > 0 else width :]
    yield " " * indent + text


def shown(text: str, indent: int) -> Iterator[str]:
    """The first SHOWN characters of a text."""
    return folded(plain(text[:SHOWN]) + (" ..." if len(text) > SHOWN else ""), indent)


def listed(parts: list[str], first: str) -> Iterator[str]:
    """`first` and the parts, with commas, broken between parts; later lines are indented by two."""
    line = first
    for k, part in enumerate(parts):
        piece = part + ("," if k < len(parts) - 1 else "")
        if len(line) + 1 + len(piece) > COLUMNS and line.strip():
            yield line
            line = "   "
        line += " " + piece
    yield line


# ---------------------------------------------------------------------------------------------------


def warnings(report: dict[str, Any]) -> list[str]:
    """What a reader should not miss, a sentence each."""
    said = []
    for name, compared in report["compared"].items():
        least = "" if compared["tokens"] >= compared["of_tokens"] else "at least "
        for task, found in compared["tasks"].items():
            if not (touched := found["rows_touched"]):
                continue
            share = touched / found["rows"]
            what = (
                "results on it mean nothing"
                if share >= MEANS_NOTHING
                else f"results on it may be {100 * share:.2g} points too good"
            )
            if least and share < MEANS_NOTHING:
                what += ", or more"
            said.append(
                f"{name} shares {GRAM}-grams with {least}{touched:,} of {found['rows']:,} questions of "
                f"{task}: {what}"
            )
    for name, source in report["sources"].items():
        if inside := source["validation_in_train"]:
            held_out = source["splits"]["validation"]["documents"]
            said.append(
                f"{name}: {inside:,} of {held_out:,} validation documents are in train too: its validation "
                "loss is too good"
            )
    for pair in report["in_two_sources"]:
        (one, other), (there, back) = pair["sources"], pair["documents"]
        said.append(
            f"{one} and {other} share documents: {there:,} of {one} are in {other}, {back:,} of {other} in "
            f"{one}; they are trained on for both weights"
        )
    return said


def lines(report: dict[str, Any]) -> Iterator[str]:
    for name, source in report["sources"].items():
        yield from of_source(name, source, report)
    yield from of_tasks(report)
    yield ""
    if report["warnings"]:
        yield "Warnings"
        for warning in report["warnings"]:
            head, *rest = folded(warning, 4)
            yield f"  - {head[4:]}"
            yield from rest
    else:
        yield "No warnings."


def of_source(name: str, source: dict[str, Any], report: dict[str, Any]) -> Iterator[str]:
    yield f"==== {name} ".ljust(COLUMNS, "=")
    yield from folded(f"{source['folder']} (revision {source['revision'][:12]})", 2)
    yield f"  {'':12}{'documents':>12}{'tokens':>17}{'bytes/token':>13}{'duplicates':>13}{'of tokens':>11}"
    for split, of in source["splits"].items():
        ratio = f"{of['bytes_per_token']:.3f}" if of["bytes_per_token"] is not None else "n/a"
        yield (
            f"  {split:12}{of['documents']:>12,}{of['tokens']:>17,}{ratio:>13}"
            f"{of['duplicates']['documents']:>13,}{of['duplicates']['token_share']:>11.2%}"
        )
    for split, of in source["splits"].items():
        if worst := of["duplicates"]["worst"]:
            yield f"  most often in {split}, {worst['count']:,} times:"
            yield from shown(worst["text"], 4)
    yield f"  validation documents that are in train too: {source['validation_in_train']:,}"
    yield ""
    first, *_ = source["splits"].values()
    yield "  length, tokens" + "".join(f"{q + '%':>9}" for q in first["length_quantiles"])
    for split, of in source["splits"].items():
        yield f"  {split:14}" + "".join(
            f"{'n/a' if n is None else format(n, ','):>9}" for n in of["length_quantiles"].values()
        )
    yield ""
    yield from of_dropped(source)
    for split, of in source["splits"].items():
        yield ""
        yield from folded(
            f"{len(of['windows'])} windows of {report['seq_len']:,} tokens, {name} {split}, drawn "
            f"with SEED={report['seed']}; {SHOWN} characters of each",
            2,
        )
        for number, window in enumerate(of["windows"], 1):
            less = f", {window['tokens']:,} tokens" if window["tokens"] < report["seq_len"] else ""
            yield f"  {number:2}  {window['shard']} from token {window['token']:,} on{less}"
            yield from shown(window["text"], 6)
    yield ""


def of_dropped(source: dict[str, Any]) -> Iterator[str]:
    dropped = {reason: of for reason, of in source["dropped"].items() if of["documents"]}
    total = sum(of["documents"] for of in dropped.values())
    yield f"  dropped: {total:,} of {source['documents_read']:,} documents read"
    for reason, of in dropped.items():
        places = [plain(f"{e['file']} row {e['row']}") for e in of["examples"]]
        yield from listed(places, f"    {reason}: {of['documents']:,}" + ("; at" if places else ""))


def of_tasks(report: dict[str, Any]) -> Iterator[str]:
    yield "==== evaluation tasks ".ljust(COLUMNS, "=")
    if not report["tasks"]:
        yield "  compared with none. Give a folder or a .zip of tasks (*.jsonl) to find text that both have:"
        yield "  make data-report CORE_BUNDLE=folder"
        return
    yield f"  {GRAM} words in a row, without case and punctuation, that a row of a task and a source both have"
    short = {name: task for name, task in report["tasks"].items() if task["short"]}
    if short:
        yield ""
        yield (
            f"  short: no string of the row has {GRAM} words; it is compared as a whole, with fewer than {SHORTEST} "
            "not"
        )
        width = max(len("task"), *map(len, short))
        yield f"    {'task':{width}}{'rows':>9}{'short':>9}{'not compared':>15}"
        for name, task in short.items():
            yield f"    {name:{width}}{task['rows']:>9,}{task['short']:>9,}{task['incomparable']:>15,}"
    for name, compared in report["compared"].items():
        yield ""
        rate = compared["text_bytes"] / 1e6 / max(compared["seconds"], 1e-9)
        yield (
            f"  {name}: compared {amount(compared['tokens'], compared['of_tokens'])}, "
            f"{compared['text_bytes'] / 1e6:,.1f} MB in {compared['seconds']:.1f} s "
            f"({rate:.1f} MB/s on {compared['cores']} core{'s' * (compared['cores'] > 1)})"
        )
        if compared["tokens"] < compared["of_tokens"]:
            yield "    evenly spread over its documents"
        touched = {task: of for task, of in compared["tasks"].items() if of["rows_touched"]}
        if touched:
            yield from touched_table(touched)
        if clean := [task for task in compared["tasks"] if task not in touched]:
            yield from listed(clean, "    shares nothing with:")


def touched_table(touched: dict[str, dict[str, Any]]) -> Iterator[str]:
    width = max(len("task"), *map(len, touched))
    yield f"    {'task':{width}}{'rows touched':>14}{'of':>9}{'':>8}{GRAM:>9}-grams{'of':>12}"
    for task, of in sorted(
        touched.items(), key=lambda entry: -entry[1]["rows_touched"] / entry[1]["rows"]
    ):
        yield (
            f"    {task:{width}}{of['rows_touched']:>14,}{of['rows']:>9,}{of['rows_touched'] / of['rows']:>8.1%}"
            f"{of['grams_found']:>15,}{of['grams']:>12,}"
        )
        for example in of["examples"]:
            yield from shown(
                f"row {example['row']}, {example['words']} words: {example['text']}", 6
            )
