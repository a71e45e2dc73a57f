"""The blocks of the screen (screen.py): each gives the ways in which it can be told, the fullest first."""

import dataclasses
import datetime
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from monitor import phrases
from monitor.facts import Fault, Gpu, Node, Seen
from monitor.phrases import NA, number, span

INDENT = 12
# Category of goodput -> the character that stands for it in the bar
LETTERS = {
    "training": "=",
    "start-up": "s",
    "evaluation": "e",
    "checkpoint": "c",
    "data wait": "d",
    "lost work": "l",
    "down": "_",
    "other": ".",
}
WELL = {"training": "green", "lost work": "red", "down": "red", "data wait": "yellow"}
WELL_PHASES = ("Running", "Succeeded")
STALE_S = 5.0  # what was seen longer ago than this is marked; of a cluster STALE_CLUSTER_S
STALE_CLUSTER_S = 30.0


@dataclasses.dataclass(frozen=True)
class Style:
    """width: of a line; ascii: whether the terminal has no other characters."""

    width: int
    ascii: bool = False

    def bar(self, share: float | None, width: int, colour: str = "") -> Text:
        """A bar of so many characters; empty where nothing is known."""
        full, rest = ("#", ".") if self.ascii else ("█", "░")
        filled = round(width * min(1.0, max(0.0, share or 0.0)))
        return Text().append(full * filled, colour).append(rest * (width - filled), "dim")

    @property
    def degrees(self) -> str:
        return "C" if self.ascii else "°C"


def line(label: str, *parts: str | Text) -> Text:
    """A line under a label: parts are text in words, which is never read as markup."""
    text = Text().append(label.ljust(INDENT) if label else "", "bold")
    for part in parts:
        text.append_text(part if isinstance(part, Text) else Text(part))
    return text


def title(seen: Seen, style: Style, now: float, trouble: str) -> Text:
    """The run, what it is at, and how old this is."""
    age = max(0.0, now - seen.now)
    limit = STALE_CLUSTER_S if seen.cluster else STALE_S
    old = f"{span(age)} old" + (f": {trouble}" if trouble else "") if age > limit or trouble else ""
    at = datetime.datetime.fromtimestamp(seen.now).strftime("%H:%M:%S")
    text = (
        Text().append(seen.run, "bold").append("  ").append(phrases.phase_words(seen), "bold cyan")
    )
    right = Text().append(old, "yellow").append("  " if old else "").append(at, "dim")
    return text.append(" " * max(2, style.width - text.cell_len - right.cell_len)).append_text(
        right
    )


def wrapped(label: Text, words: str, console: Console, width: int, style: str = "") -> list[Text]:
    """Words behind a label, on as many lines as they need."""
    inner = Text(words, style).wrap(console, max(20, width - label.cell_len))
    blank = Text(" " * label.cell_len)
    return [
        Text().append_text(label if n == 0 else blank).append_text(each)
        for n, each in enumerate(inner)
    ]


def faults(found: Sequence[Fault], console: Console, style: Style) -> Iterator[list[Text]]:
    """What is wrong: all of it; a line and the next command each; and of many the first three."""

    def full(fault: Fault) -> list[Text]:
        about = f"{fault.name} {fault.about}".strip()
        said = wrapped(
            Text("WRONG  " if not fault.failing else "FAILS  ", "bold red"),
            f"{about}: {fault.text}",
            console,
            style.width,
        )
        return said + (
            wrapped(Text("  next ", "bold"), fault.next, console, style.width) if fault.next else []
        )

    def short(fault: Fault) -> list[Text]:
        said = full(fault)
        behind = [next((each for each in said if each.plain.startswith("  next ")), None)]
        return [said[0], *(each for each in behind if each)]

    yield [each for fault in found for each in full(fault)]
    yield [each for fault in found for each in short(fault)]
    rest = len(found) - 3
    if rest > 0:
        yield [each for fault in found[:3] for each in short(fault)] + [
            Text(f"       and {rest} more; ONCE=1 make monitor lists all", "bold red")
        ]


def verdict(said: str, found: Sequence[Fault], console: Console, style: Style) -> list[Text]:
    if said:
        return wrapped(line("verdict"), said, console, style.width)
    return [] if found else [line("", Text("nothing is wrong", "green"))]


# ---------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------


def run(seen: Seen, style: Style) -> Iterator[list[list[Text]]]:
    """Step with bar and end; loss; speed; where time went. Each with the ways to tell it."""
    p, plan = seen.progress, seen.expected
    if p is None:
        return
    whole = f"{p.step:,}/{p.last_step:,}" if p.last_step else f"{p.step:,}"
    percent = f"{100 * p.step / p.last_step:5.1f}% " if p.last_step else ""
    left = phrases.eta_s(seen)
    end = ""
    if left is not None:
        at = phrases.clock(seen.now + left, seen.now)
        end = f"  {span(left)} to go, {at}{phrases.planned_end(seen)}"
    room = style.width - INDENT - len(whole) - len(percent) - len(end) - 2
    bar = (
        style.bar(p.step / p.last_step, min(60, room), "green")
        if p.last_step and room >= 8
        else Text()
    )
    yield [[line("step", f"{whole} {percent}", bar, end)]]
    behind = f" at {p.val_step:,}" if p.val_step is not None else ""
    skipped = f"   skipped {p.skipped_steps}" if p.skipped_steps else ""
    again = f"   attempt {p.attempt + 1}" if p.attempt else ""
    yield [
        [
            line(
                "loss",
                f"{number(p.loss)}   validation {number(p.val_loss)}{behind}{skipped}{again}",
            )
        ]
    ]
    share = phrases.share_of_plan(seen)
    of_plan = ""
    if share is not None and plan.tokens_per_s is not None:
        of_plan = f", {100 * share:.0f}% of plan"
    rate = NA if p.tokens_per_s is None else f"{p.tokens_per_s:,.0f} tokens/s"
    mfu = NA if p.mfu_percent is None else f"{p.mfu_percent:.1f}%"
    planned = f" of {plan.mfu_percent:.1f}%" if plan.mfu_percent is not None else ""
    each = "" if p.step_s is None else f"   {milliseconds(p.step_s)} a step"
    yield [[line("speed", f"{rate}{of_plan}   MFU {mfu}{planned}{each}")]]
    memory = f"{number(p.mem_gib, '.2f')} GiB" + (
        f", {plan.memory_gib:.2f} by plan" if plan.memory_gib else ""
    )
    waits = (
        ""
        if p.data_wait_fraction is None
        else f"   waits for data {100 * p.data_wait_fraction:.1f}%"
    )
    yield [[line("process", f"{memory}{waits}")], []]
    yield list(goodput(seen, style))
    if p.checkpoint_step is not None or plan.checkpoint_bytes:
        yield [[line("checkpoint", phrases.saved(seen))]]


def milliseconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{1000 * seconds:,.0f} ms"


def goodput(seen: Seen, style: Style) -> Iterator[list[Text]]:
    """The bar of causes, and what its characters mean, largest first after training."""
    parts = phrases.goodput(seen)
    if not parts:
        return
    width = min(40, style.width - INDENT - 8)
    bar = Text()
    for name, share in parts:
        bar.append(LETTERS[name] * round(width * share), WELL.get(name, ""))
    bar.truncate(width)
    trained = dict(parts).get("training", 0.0)
    lost = sorted(((share, name) for name, share in parts if name != "training"), reverse=True)
    said = "  ".join(f"{LETTERS[name]} {name} {100 * share:.1f}%" for share, name in lost)
    whole = line("goodput", f"{100 * trained:5.1f}% ", bar)
    yield [whole, line(" " * INDENT, said)] if said else [whole]
    yield [line("goodput", f"{100 * trained:.1f}%  {said}")]


# ---------------------------------------------------------------------------------------------------
# Devices, network, disk
# ---------------------------------------------------------------------------------------------------


def gpus(seen: Seen, style: Style) -> Iterator[list[Text]]:
    """A line each, and what they took; several on a line; one for each node; one for all."""
    here = [(node, gpu) for node in seen.nodes for gpu in node.gpus]
    none = [node for node in seen.nodes if not node.gpus and node.gpus_why]
    why = [
        line(
            "GPUs" if n == 0 and not here else " " * INDENT,
            f"{node_name(node, seen)}{NA}: {node.gpus_why}",
        )
        for n, node in enumerate(none)
    ]
    if not here:
        yield why
        yield why[:1]
        return
    taken = [line("energy", words)] if (words := phrases.energy(seen, short=True)) else []
    yield (
        [labelled("GPUs", n, gpu_line(node, gpu, style)) for n, (node, gpu) in enumerate(here)]
        + why
        + taken
    )
    cells = [gpu_cell(node, gpu, style) for node, gpu in here]
    wide = max(cell.cell_len for cell in cells) + 3
    columns = max(1, (style.width - INDENT) // wide)
    rows = [cells[n : n + columns] for n in range(0, len(cells), columns)]
    if columns > 1:
        yield [labelled("GPUs", n, joined(row, wide)) for n, row in enumerate(rows)] + why + taken
    by_node = [(node, node.gpus) for node in seen.nodes if node.gpus]
    yield [
        labelled("GPUs", n, Text(f"{node_name(node, seen)}{summary(gpus, style)}"))
        for n, (node, gpus) in enumerate(by_node)
    ] + why[:1]
    yield [line("GPUs", summary([gpu for _, gpu in here], style))]


def labelled(label: str, n: int, text: Text) -> Text:
    return line(label if n == 0 else " " * INDENT, text)


def joined(cells: Sequence[Text], width: int) -> Text:
    text = Text()
    for cell in cells:
        text.append_text(cell).append(" " * (width - cell.cell_len))
    return text


def node_name(node: Node, seen: Seen) -> str:
    """In front of what is of a node, where there are several."""
    return f"node {node.node}: " if len(seen.nodes) > 1 else ""


def called(node: Node, gpu: Gpu) -> str:
    return f"{node.node}/{gpu.index}"


def percent(value: float | None) -> str:
    return NA if value is None else f"{value:.0f}%"


def degrees(gpu: Gpu, style: Style) -> str:
    return NA if gpu.temp_c is None else f"{gpu.temp_c:.0f}{style.degrees}"


def gpu_line(node: Node, gpu: Gpu, style: Style) -> Text:
    """'0/3  98% ████████░░  71/80 GiB   681/700 W   61°C  power cap'"""
    if gpu.lost:
        return Text(f"{called(node, gpu):<5} ").append("lost: it no longer answers", "bold red")
    share = (
        gpu.memory_gib / gpu.memory_total_gib
        if gpu.memory_gib is not None and gpu.memory_total_gib
        else None
    )
    room = 6 if style.width < 90 else 10
    return (
        Text(f"{called(node, gpu):<5}{percent(gpu.utilisation_percent):>5} ")
        .append_text(style.bar(share, room))
        .append(
            f" {share_of(gpu.memory_gib, gpu.memory_total_gib):>7} GiB"
            f" {share_of(gpu.power_w, gpu.power_limit_w):>8} W {degrees(gpu, style):>5} "
        )
        .append(phrases.reasons(gpu), "yellow")
    )


def gpu_cell(node: Node, gpu: Gpu, style: Style) -> Text:
    """The same in short: '0/3   98% 71/80G 681/700W 61°C power cap'"""
    if gpu.lost:
        return Text(f"{called(node, gpu):<5} ").append("lost", "bold red")
    return Text(
        f"{called(node, gpu):<5}{percent(gpu.utilisation_percent):>4} "
        f"{share_of(gpu.memory_gib, gpu.memory_total_gib)}G {share_of(gpu.power_w, gpu.power_limit_w)}W "
        f"{degrees(gpu, style)} "
    ).append("!" if gpu.throttle else " ", "yellow")


def share_of(value: float | None, most: float | None) -> str:
    return f"{number(value, '.0f')}/{number(most, '.0f')}"


def summary(gpus: Sequence[Gpu], style: Style) -> str:
    """'8 GPUs 97-99%  71-72/80 GiB  380-395/400 W  55-63°C  2 throttled'"""

    def between(values: list[float | None]) -> str:
        known = [value for value in values if value is not None]
        if not known:
            return NA
        low, high = f"{min(known):.0f}", f"{max(known):.0f}"
        return low if low == high else f"{low}-{high}"

    used = between([gpu.utilisation_percent for gpu in gpus])
    held = (
        between([gpu.memory_gib for gpu in gpus])
        + "/"
        + between([gpu.memory_total_gib for gpu in gpus])
    )
    drawn = (
        between([gpu.power_w for gpu in gpus]) + "/" + between([gpu.power_limit_w for gpu in gpus])
    )
    slow, lost = sum(bool(gpu.throttle) for gpu in gpus), sum(gpu.lost for gpu in gpus)
    said = [
        f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}  {used}%",
        f"{held} GiB",
        f"{drawn} W",
        f"{between([gpu.temp_c for gpu in gpus])}{style.degrees}",
    ]
    said += [f"{slow} throttled"] if slow else []
    said += [f"{lost} lost"] if lost else []
    return "  ".join(said)


def network(seen: Seen, style: Style) -> Iterator[list[Text]]:
    """Each interface that carries anything, of each node; the busiest of each; none."""
    plan = phrases.planned_network(seen)
    planned = [line(" " * INDENT, plan)] if plan else []
    for most in (3, 1):
        found = [(node, link) for node in seen.nodes for link in phrases.busy(node.links)[:most]]
        yield [
            labelled(
                "network", n, Text(f"{node_name(node, seen)}{link.name} {phrases.link_words(link)}")
            )
            for n, (node, link) in enumerate(found)
        ] + planned
    yield [line("network", plan)] if plan else []


def storage(seen: Seen, style: Style) -> Iterator[list[Text]]:
    """Disk and memory of each node; of the first."""
    rows = [
        f"{node_name(node, seen)}disk {phrases.disk(node, seen)}"
        + (f"  memory {phrases.memory(node)}" if node.memory_bytes is not None else "")
        for node in seen.nodes
        if node.disk_free_bytes is not None or node.memory_bytes is not None
    ]
    yield [labelled("machine", n, Text(row)) for n, row in enumerate(rows)]
    yield [labelled("machine", n, Text(row)) for n, row in enumerate(rows[:1])]


# ---------------------------------------------------------------------------------------------------
# Pods
# ---------------------------------------------------------------------------------------------------


def pods(seen: Seen, style: Style) -> Iterator[list[Text]]:
    """Each with its last line; each on a line; how many are in which phase."""
    there = seen.cluster
    if there is None:
        return
    job = line("job", f"{there.job_name} in {there.words}: {there.job}")
    head = [Text(), job] + (
        [line(" " * INDENT, Text(there.problem, "yellow"))] if there.problem else []
    )
    rows = [pod_line(n, seen) for n in range(len(there.pods))]
    said = [
        Text(f"{'':{INDENT}}  {text}", "dim")
        if (text := phrases.last_line(pod, seen.now))
        else None
        for pod in there.pods
    ]
    events = [
        line("events" if n == 0 else " " * INDENT, event)
        for n, event in enumerate(there.events[-4:])
    ]
    yield (
        head
        + [each for pair in zip(rows, said, strict=True) for each in pair if each is not None]
        + events
    )
    yield head + rows + events[-1:]
    yield head[1:] + rows
    well = [pod for pod in there.pods if pod.phase in WELL_PHASES]
    said_of = [f"{len(well)} of {there.wanted_pods} run"] if well else []
    said_of += [
        f"{pod.index} {phrases.pod_state(pod, seen.now)}" for pod in there.pods if pod not in well
    ]
    yield [*head[1:], line("pods", ", ".join(said_of) or "none yet")]


def pod_line(n: int, seen: Seen) -> Text:
    assert seen.cluster
    pod = seen.cluster.pods[n]
    where = " ".join(filter(None, [pod.node, f"({pod.site})" if pod.site else ""])) or "no node yet"
    again = f"  {pod.restarts} restart{'s' * (pod.restarts != 1)}" if pod.restarts else ""
    well = pod.phase in WELL_PHASES
    return line(
        "pods" if n == 0 else " " * INDENT,
        f"{pod.index:>2}  ",
        Text(phrases.pod_state(pod, seen.now), "" if well else "yellow"),
        f"  {where}{again}",
    )
