"""What `kubectl logs --prefix --timestamps` prints of the pods of a Job -> what each tells of its node, and its last
lines. Pure functions.

    [pod/NAME/trainer] 2026-11-22T08:11:53.123456789Z step=1200/18865 loss=3.4127 ...

A pod whose image is too old for a teller is known by its console lines: its steps, and nothing of its GPUs.
"""

import dataclasses
import datetime
import re
import statistics
from collections.abc import Collection, Mapping, Sequence

from k8s.cluster import log_lines
from k8s.cluster.log_lines import POD_LINE
from monitor.facts import Node, Pod, Progress, of_line

KEPT = 12  # last lines of a pod
SILENT_S = 60.0  # without a word of the teller, while the trainer speaks: it is gone
STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:(\.\d{1,6})\d*)?(Z|[+-]\d\d:\d\d)(?: |$)")
STEP = re.compile(r"(?:^|\s)step=(\d+)/(\d+) (?=.*\w+=)")
NUMBER = re.compile(r"(\w+)=(-?\d\S*)")
NO_WONDER = re.compile(
    r"is waiting to start|\(NotFound\)|not found$|is terminated$"
)  # it has not begun, or just left


@dataclasses.dataclass(frozen=True)
class Line:
    time: float | None  # when it was written, Unix seconds
    text: str


@dataclasses.dataclass(frozen=True)
class Speech:
    """What a pod's log says. lines: the last ones, without what it tells of its node; heard: how many there were."""

    lines: tuple[Line, ...] = ()
    node: Node | None = None
    heard: int = 0
    told: bool = False  # whether a teller spoke among them


def parted(text: str, pods: Collection[str]) -> tuple[dict[str, list[Line]], list[str]]:
    """The lines of each of these pods, and what kubectl itself complains of. Others' lines are left out."""
    names = "|".join(re.escape(name) for name in sorted(pods)) or "(?!)"
    # The last line of a log has no line end yet where it is still being written.
    text = re.sub(rf"(?<=[^\n])(?=\[pod/(?:{names})/[^\]]+\] \d{{4}}-)", "\n", text)
    found: dict[str, list[Line]] = {}
    complaints = []
    for line in text.split("\n"):
        head = re.match(r"\[pod/([^/\]]+)/[^\]]+\] ?", line)
        if head and head[1] in pods:
            found.setdefault(head[1], []).append(stamped(line[head.end() :]))
        elif line.startswith("error: ") and not NO_WONDER.search(line):
            complaints.append(line.removeprefix("error: "))
    return found, complaints


def stamped(line: str) -> Line:
    """A line without the time that stands in front of it."""
    if not (found := STAMP.match(line)):
        return Line(None, line)
    moment = datetime.datetime.fromisoformat(
        found[1] + (found[2] or "") + found[3].replace("Z", "+00:00")
    )
    return Line(moment.timestamp(), line[found.end() :])


def speech_of(pod: Pod, found: Sequence[Line], before: Speech, runs: bool) -> Speech:
    """What a pod says, given its last lines. before: what it said at the last look, which stands where its teller is
    only out of reach behind many other lines."""
    said = [node for line in found if POD_LINE in line.text and (node := of_line(line.text))]
    rest = [line for line in found if POD_LINE not in line.text and line.text.strip()]
    newest = next((line.time for line in reversed(rest) if line.time is not None), None)
    node = said[-1] if said else None
    if (
        node is None
        and before.told
        and before.node
        and (newest is None or newest - before.node.time < SILENT_S)
    ):
        node = before.node
    told = node is not None
    node = node or of_console(pod, rest)
    if node:
        node = dataclasses.replace(node, node=pod.index, at_work=runs and node.at_work is not False)
    return Speech(tuple(rest[-KEPT:]), node, len(found), told)


def of_console(pod: Pod, found: Sequence[Line]) -> Node | None:
    """What the console lines of a trainer tell; None where there is none of a step."""
    steps = [(line, step) for line in found if (step := STEP.search(line.text))]
    if not steps:
        return None
    last, at = steps[-1]
    numbers = [values(line.text) for line, _ in steps]
    trained = [each for each in numbers if "step_ms" in each]
    latest: Mapping[str, float] = trained[-1] if trained else {}
    took = [each["step_ms"] / 1000 for each in trained]
    evaluated = [
        (int(step[1]), each["val_loss"])
        for (_, step), each in zip(steps, numbers, strict=True)
        if "val_loss" in each
    ]
    complaints = [*log_lines.complaints_of(line.text for line in found)]
    progress = Progress(
        int(at[1]),
        int(latest.get("tokens", 0)),
        int(at[2]),
        step_time=last.time,
        loss=latest.get("loss"),
        step_s=statistics.median(took) if took else None,
        tokens_per_s=latest.get("tokens_per_s"),
        mfu_percent=latest.get("mfu"),
        mem_gib=latest.get("mem_gib"),
        val_loss=evaluated[-1][1] if evaluated else None,
        val_step=evaluated[-1][0] if evaluated else None,
    )
    return Node(
        pod.index,
        pod.name,
        last.time or 0.0,
        progress=progress,
        gpus_why="its image tells nothing of them",
        complaint=complaints[-1].strip() if complaints else "",
    )


def values(text: str) -> dict[str, float]:
    """The numbers of a console line; what is n/a is left out."""
    found = {}
    for key, value in NUMBER.findall(text):
        try:
            found[key] = float(value)
        except ValueError:  # step=1200/18865, or another's words
            continue
    return found


def with_speech(pod: Pod, speech: Speech) -> Pod:
    """The pod with its last lines."""
    if not speech.lines:
        return pod
    return dataclasses.replace(
        pod,
        last_line=speech.lines[-1].text,
        last_line_time=speech.lines[-1].time,
        lines=tuple(line.text for line in speech.lines),
    )
