"""Where the time of a step goes, from a trace that torch's profiler wrote: shares that add up to the whole of it.

    CPU   main thread   |mm|     |_softmax|  |copy_|      |        operators; each instant is the innermost one's
          gloo               |======all_reduce======|              hidden behind an operator, or else exposed
    GPU   stream 7      |gemm|flash_fwd|   |elementwise|           kernels
          stream 20               |====ncclDevKernel====|          hidden behind a kernel, or else exposed
          host          [data wait]                                where no kernel runs: data wait, or a host gap

Each instant of a step belongs to what comes first of: work, copies between host and GPU, communication, the wait for
a batch, and else a host gap. Kernels that run at the same time have equal parts of it. What kind of work it is follows
from the operators round it (on a GPU those that launched the kernel) and from its name; what neither tells is `other`,
under its own name. Nothing is assumed of a step but that it bears the mark STEP, and the wait for its batch DATA.
Standard library only.
"""

import dataclasses
import gzip
import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

STEP, DATA = "train step", "data wait"  # how the trainer marks them in a trace

COMMUNICATION = "communication, exposed"
CLASSES = (
    "matmul",
    "attention",
    "loss",
    "optimizer",
    COMMUNICATION,
    "data wait",
    "host gaps",
    "other",
)
BIGGEST = 6  # names of `other` that are told
CALLS = "calls of compiled code"  # what torch.compile does round the kernels that it made
OF_COMPILER = re.compile(
    r"## Call CompiledFxGraph|TorchDynamo |Torch-Compiled Region|CompiledFunction|Pregraph"
)

# Names of operators, of the parts that make up this trainer's model. A batched product is one of attention.
PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::linear", "aten::_scaled_mm"}
OF_ATTENTION = {
    "aten::bmm",
    "aten::baddbmm",
    "aten::softmax",
    "aten::_softmax",
    "aten::_softmax_backward_data",
}
LOSS, OPTIMIZER = "_LinearCrossEntropy", "Optimizer."  # how the names of what is round them begin
SENDS = re.compile(r"(gloo|nccl|mpi|ucc):|c10d::|_c10d_functional|record_param_comms")

# Names of kernels: of cuBLAS, CUTLASS and Triton's templates; of flash-attn, cuDNN, torch and Triton; of NCCL.
KERNEL_SENDS = re.compile(r"nccl|multimem_|(one|two)_shot_all_reduce", re.IGNORECASE)
KERNEL_ATTENDS = re.compile(r"flash|fmha|sdpa|attention|softmax", re.IGNORECASE)
KERNEL_MULTIPLIES = re.compile(
    r"gemm|gemv|nvjet|cublas|cutlass|xmma|splitk|triton_tem\w*_(add)?mm", re.IGNORECASE
)
KERNEL_UPDATES = re.compile(r"FusedAdam")

WORK, COPY, SEND, WAIT = range(4)  # kinds of what goes on, the first before the others


class TraceError(Exception):
    """A trace that does not say where time went; the message says what it lacks."""


class Span(NamedTuple):
    """Something that goes on, in whole nanoseconds: its kind, the class that its time counts for, and its name."""

    begin: int
    end: int
    kind: int
    of: str
    name: str


@dataclasses.dataclass(frozen=True)
class Shares:
    """Nanoseconds of all steps of a trace. Those of CLASSES add up to wall_ns.

    head_ns of matmul was in the head and its loss; hidden_ns of communication lies behind work, and so in the other
    classes; between_ns passed between the first step and the last in none.
    """

    steps: int
    wall_ns: int
    by_class: Mapping[str, float]
    others: Mapping[str, float]  # name -> ns, of class `other`
    head_ns: float
    hidden_ns: int
    between_ns: int
    on_gpu: bool

    @property
    def step_ms(self) -> float:
        return self.wall_ns / self.steps / 1e6

    def percent(self, ns: float) -> float:
        return 100 * ns / self.wall_ns

    def table(self) -> list[str]:
        """A line for each class, and their sum."""
        biggest = sorted(self.others.items(), key=lambda item: -item[1])[:BIGGEST]
        beside = {
            "matmul": f"of it in the head {self.percent(self.head_ns):.1f}%"
            if self.head_ns
            else "",
            COMMUNICATION: f"and {self.percent(self.hidden_ns):.1f}% hidden behind work, which is counted there"
            if self.hidden_ns
            else "",
            "other": ", ".join(f"{name} {self.percent(ns):.1f}%" for name, ns in biggest),
        }
        rows = [*self.by_class.items(), ("a step", float(self.wall_ns))]
        return [
            f"{name:<23}{self.percent(ns):6.1f}% {ns / self.steps / 1e6:10.2f} ms   {beside.get(name, '')}".rstrip()
            for name, ns in rows
        ]


# ---------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace as torch.profiler exports it (.json or .json.gz). Raises TraceError, OSError."""
    try:
        with (
            gzip.open(path, "rt") if path.suffix == ".gz" else open(path, encoding="utf-8") as file
        ):
            return list(json.load(file)["traceEvents"])
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise TraceError(
            f"{path} is no trace of torch's profiler ({type(error).__name__}: {error})"
        ) from None


def shares(events: Iterable[Mapping[str, Any]], on_gpu: bool) -> Shares:
    """Where the time of the steps in a trace went. Raises TraceError where it has none, or of a GPU no kernels."""
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    marks = [
        event for event in whole if event["name"] == STEP and event.get("cat") == "user_annotation"
    ]
    if not marks:
        raise TraceError(f"the trace has no step: nothing in it is marked {STEP!r}")
    steps = sorted((ns(mark["ts"]), ns(mark["ts"] + mark["dur"])) for mark in marks)
    if on_gpu and not any(event.get("cat") == "kernel" for event in whole):
        raise TraceError(
            "the trace has no kernels: the driver or another profiler keeps torch's from the GPU"
        )
    spans = of_gpu(whole) if on_gpu else of_cpu(whole, (marks[0]["pid"], marks[0]["tid"]))
    return divide(spans, steps, on_gpu)


def ns(us: float) -> int:
    return round(us * 1000)


def threads(
    events: Iterable[Mapping[str, Any]],
) -> dict[tuple[Any, Any], list[tuple[int, int, str, Any]]]:
    """What each thread of the host did: (begin, end, name, correlation or None), those round others before them."""
    found: dict[tuple[Any, Any], list[tuple[int, int, str, Any]]] = defaultdict(list)
    for event in events:
        category = event.get("cat")
        launches = category in ("cuda_runtime", "cuda_driver")
        if launches or category in ("cpu_op", "user_annotation"):
            begin = ns(event["ts"])
            found[event["pid"], event["tid"]].append(
                (
                    begin,
                    begin + ns(event["dur"]),
                    event["name"],
                    event.get("args", {}).get("correlation") if launches else None,
                )
            )
    for ranges in found.values():
        ranges.sort(key=lambda r: (r[0], -r[1]))
    return found


def innermost(
    ranges: list[tuple[int, int, str, Any]],
) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """(from, to, names from the outermost to the innermost) of a thread, where there is any; in order of time."""
    stack: list[tuple[int, tuple[str, ...]]] = []  # (end, names)
    at = 0
    for begin, end, name, _ in ranges:
        while stack and stack[-1][0] <= begin:
            until, names = stack.pop()
            if until > at:
                yield at, until, names
                at = until
        if stack:
            end = min(end, stack[-1][0])  # times are rounded one by one
            if begin > at:
                yield at, begin, stack[-1][1]
        stack.append((end, (*(stack[-1][1] if stack else ()), name)))
        at = max(at, begin)
    while stack:
        until, names = stack.pop()
        if until > at:
            yield at, until, names
            at = until


def launched_by(ranges: list[tuple[int, int, str, Any]]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """(correlation, names round it) of each call of a thread that launches something on a GPU."""
    stack: list[tuple[int, str]] = []
    for begin, end, name, correlation in ranges:
        while stack and stack[-1][0] <= begin:
            stack.pop()
        if correlation is not None:
            yield correlation, tuple(name for _, name in stack)
        else:
            stack.append((end, name))


# ---------------------------------------------------------------------------------------------------
# What goes on
# ---------------------------------------------------------------------------------------------------


def of_cpu(events: list[Mapping[str, Any]], main: tuple[Any, Any]) -> Iterator[Span]:
    """Operators of the main thread by their self time; what is sent, by whichever thread; the waits for data. What only
    stands in marks (Python between operators) is nothing."""
    marks = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    for thread, ranges in threads(events).items():
        yield from (
            Span(begin, end, SEND, COMMUNICATION, name)
            for begin, end, name, _ in ranges
            if SENDS.match(name)
        )
        if thread != main:
            continue
        for begin, end, names in innermost(ranges):
            if DATA in names:
                yield Span(begin, end, WAIT, "data wait", DATA)
            elif (kind := class_of(names)) and not (kind == "other" and names[-1] in marks):
                yield Span(
                    begin,
                    end,
                    WORK,
                    kind,
                    in_head(names)
                    if kind == "matmul"
                    else CALLS
                    if OF_COMPILER.match(names[-1])
                    else names[-1],
                )


def class_of(names: tuple[str, ...]) -> str | None:
    """The class of what runs in these operators, from the outermost to the innermost; None where others are waited for."""
    if any(name.startswith(OPTIMIZER) for name in names):
        return "optimizer"
    if SENDS.match(names[-1]):
        return None
    in_loss = any(LOSS in name for name in names)
    for name in reversed(names):
        if name in PRODUCTS:
            return "matmul"
        if not in_loss and (
            name in OF_ATTENTION
            or "scaled_dot_product" in name
            or ("fused" in name and "softmax" in name)
        ):
            return "attention"
    return "loss" if in_loss else "other"


def in_head(names: tuple[str, ...]) -> str:
    return "head" if any(LOSS in name for name in names) else "blocks"


def of_gpu(events: list[Mapping[str, Any]]) -> Iterator[Span]:
    """Kernels and copies of all streams, and the host's waits for data."""
    by = threads(events)
    launchers = {
        correlation: names for ranges in by.values() for correlation, names in launched_by(ranges)
    }
    for ranges in by.values():
        yield from (
            Span(begin, end, WAIT, "data wait", DATA)
            for begin, end, name, _ in ranges
            if name == DATA
        )
    for event in events:
        category, name = event.get("cat"), event["name"]
        if category not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        begin = ns(event["ts"])
        end = begin + ns(event["dur"])
        names = launchers.get(event.get("args", {}).get("correlation"), ())
        if category != "kernel":
            updates = any(launcher.startswith(OPTIMIZER) for launcher in names)
            yield Span(begin, end, COPY, "optimizer" if updates else "other", name)
        elif KERNEL_SENDS.search(name):
            yield Span(begin, end, SEND, COMMUNICATION, name)
        else:
            kind = class_of_kernel(name, names)
            yield Span(
                begin, end, WORK, kind, in_head(names) if kind == "matmul" else said(name, names)
            )


def class_of_kernel(name: str, names: tuple[str, ...]) -> str:
    """The class of a kernel, by the operators that launched it and its own name."""
    if any(launcher.startswith(OPTIMIZER) for launcher in names) or KERNEL_UPDATES.search(name):
        return "optimizer"
    in_loss = any(LOSS in launcher for launcher in names)
    if not in_loss and (KERNEL_ATTENDS.search(name) or (names and class_of(names) == "attention")):
        return "attention"
    if KERNEL_MULTIPLIES.search(name) or (
        names and class_of(names) == "matmul" and not name.startswith("triton_")
    ):
        return "matmul"
    return "loss" if in_loss else "other"


def said(name: str, names: tuple[str, ...]) -> str:
    """What to call a kernel: by the operator that launched it, unless it was generated and tells more itself."""
    operator = next((launcher for launcher in reversed(names) if launcher.startswith("aten::")), "")
    return operator if operator and not name.startswith("triton_") else name[:60]


# ---------------------------------------------------------------------------------------------------
# Adding up
# ---------------------------------------------------------------------------------------------------


def divide(spans: Iterable[Span], steps: list[tuple[int, int]], on_gpu: bool) -> Shares:
    """Give each nanosecond of the steps to what goes on in it. steps: (begin, end), in order, apart from each other."""
    by_class, others = dict.fromkeys(CLASSES, 0.0), Counter[str]()
    head_ns, hidden_ns = 0.0, 0
    for begin, end, active in moments(spans, steps):
        length = end - begin
        going = next((active[kind] for kind in (WORK, COPY, SEND, WAIT) if active[kind]), None)
        if going is None:
            by_class["host gaps"] += length
            continue
        total = sum(going.values())
        for (of, name), count in going.items():
            part = length * count / total
            by_class[of] += part
            if of == "other":
                others[name] += part  # type: ignore[assignment]
            head_ns += part if (of, name) == ("matmul", "head") else 0.0
        if active[SEND] and (active[WORK] or active[COPY]):
            hidden_ns += length
    wall_ns = sum(end - begin for begin, end in steps)
    return Shares(
        len(steps),
        wall_ns,
        by_class,
        dict(others),
        head_ns,
        hidden_ns,
        steps[-1][1] - steps[0][0] - wall_ns,
        on_gpu,
    )


Active = tuple[Counter[tuple[str, str]], ...]  # by kind, how many of a class and name are going on


def moments(
    spans: Iterable[Span], steps: list[tuple[int, int]]
) -> Iterator[tuple[int, int, Active]]:
    """The steps cut up wherever something begins or ends: (from, to, what goes on)."""
    ordered = sorted((span for span in spans if span.end > span.begin), key=lambda span: span.begin)
    active: Active = tuple(Counter[tuple[str, str]]() for _ in range(4))
    ends: list[tuple[int, int, tuple[str, str]]] = []
    at = position = 0

    def advance(to: int) -> None:
        """Forget what has ended by now, and take up what has begun."""
        nonlocal position
        while position < len(ordered) and ordered[position].begin <= to:
            span = ordered[position]
            position += 1
            if span.end > to:
                active[span.kind][span.of, span.name] += 1
                heapq.heappush(ends, (span.end, span.kind, (span.of, span.name)))
        while ends and ends[0][0] <= to:
            _, kind, key = heapq.heappop(ends)
            active[kind][key] -= 1
            if not active[kind][key]:
                del active[kind][key]

    for begin, end in steps:
        at = begin
        advance(at)
        while at < end:
            following = min(
                end,
                ends[0][0] if ends else end,
                ordered[position].begin if position < len(ordered) else end,
            )
            if following > at:
                yield at, following, active
            at = following
            advance(at)
