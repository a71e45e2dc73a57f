"""Where the time of a step goes, by the events of torch's profiler. The shares add up to the whole step.

    CPU   main thread   |mm|     |_softmax|  |copy_|      |        operators, by their self time
          gloo               |======all_reduce======|              hidden behind an operator, or else exposed
    GPU   stream 7      |gemm|flash_fwd|   |elementwise|           kernels
          stream 20               |====ncclDevKernel====|          hidden behind a kernel, or else exposed
          host          [data wait]                                where no kernel runs: data wait, or a host gap

The steps are cut wherever something begins or ends. Each piece belongs to exactly one class: the innermost operator's
on a CPU; on a GPU a kernel's, or else a copy's; where neither works, to communication, the wait for a batch, or a host
gap. The class follows from the names of the operators around (on a GPU those that launched the kernel) and from its own
name. What neither tells is `other`, under its own name. A step carries the mark STEP, the wait for its batch DATA.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

STEP, DATA = "train step", "data wait"  # how the trainer marks them

COMMUNICATION, GAPS, OTHER = "communication, exposed", "host gaps", "other"
CLASSES = ("matmul", "attention", "loss", "optimizer", COMMUNICATION, DATA, GAPS, OTHER)
A_STEP = "a step"  # name of the table's last row
ROW = re.compile(r"^(\w[\w ,]*?) +([\d.]+)% +([\d.]+) ms", re.MULTILINE)
LARGEST = 6  # names of `other` in the table
HEAD = "head"  # name of matmuls in the output head

LAUNCH = re.compile(r"^cu[A-Z]|^cuda[A-Z]")  # of CUDA's driver, of its runtime
COPY = "Mem"  # how the names of copies on a GPU begin

# Names of operators and of kernels: cuBLAS, CUTLASS, flash-attn, cuDNN, Triton, NCCL.
LOSS = "_LinearCrossEntropy"
OPTIMIZER = re.compile(r"^Optimizer\.|FusedAdam")
SENDS = re.compile(
    r"^(gloo|mpi|ucc):|^c10d::|^_c10d_functional|^record_param_comms|nccl|multimem_|_shot_all_reduce"
)
# a batched product is one of attention: this trainer's model has no other
ATTENTION = re.compile(
    r"^aten::(bmm|baddbmm|_?softmax(_backward_data)?)$|scaled_dot_product|fused\w*softmax"
    r"|flash|fmha|sdpa|attention"
)
MATMUL = re.compile(
    r"^aten::(mm|addmm_?|linear|_scaled_mm)$|gemm|gemv|nvjet|cublas|cutlass|xmma|split[kK]"
    r"|triton_tem\w*_(add)?mm"
)
COMPILED_CALL = re.compile(
    r"## Call CompiledFxGraph|TorchDynamo |Torch-Compiled Region|CompiledFunction|Pregraph"
)


class Span(NamedTuple):
    """Nanoseconds that belong to a class of CLASSES, under a name."""

    begin: int
    end: int
    kind: str
    name: str = ""


@dataclass(frozen=True)
class Shares:
    """Nanoseconds of all recorded steps. Those of CLASSES add up to wall_ns.

    `others` divides class `other` by name. `head_ns` of matmul was in the output head. `hidden_ns` of communication
    overlapped with work, and is counted there.
    """

    steps: int
    wall_ns: int
    by_class: Mapping[str, float]
    others: Counter[str]
    head_ns: float
    hidden_ns: float

    @property
    def step_ms(self) -> float:
        return self.wall_ns / self.steps / 1e6

    def percent(self, ns: float) -> float:
        return 100 * ns / self.wall_ns

    def table(self) -> list[str]:
        """Return a line for each class, and one for their sum."""
        largest = self.others.most_common(LARGEST)
        notes = {
            "matmul": f"of it in the head {self.percent(self.head_ns):.1f}%",
            COMMUNICATION: f"and {self.percent(self.hidden_ns):.1f}% hidden behind work, which is counted there",
            OTHER: ", ".join(f"{name} {self.percent(ns):.1f}%" for name, ns in largest),
        }
        return [
            f"{name:<23}{self.percent(ns):6.1f}% {ns / self.steps / 1e6:10.2f} ms   "
            f"{notes.get(name, '')}".rstrip()
            for name, ns in [*self.by_class.items(), (A_STEP, self.wall_ns)]
        ]


def read_table(text: str) -> dict[str, tuple[float, float]]:
    """Read Shares.table: percent and milliseconds of each row, by its name."""
    rows = ROW.findall(text)
    return {name: (float(percent), float(ms)) for name, percent, ms in rows}


def shares(events: Iterable[FunctionEvent], on_gpu: bool) -> Shares:
    """Divide the time of the recorded steps. Raises ValueError if there is none, or no kernel of a GPU."""
    ordered = sorted(events, key=lambda event: (event.time_range.start, -event.time_range.end))
    on_cpu = [event for event in ordered if event.device_type == DeviceType.CPU]
    steps = [event for event in on_cpu if event.name == STEP]
    if not steps:
        raise ValueError(f"no step was recorded: nothing is marked {STEP!r}")
    if not on_gpu:
        spans = spans_on_cpu(on_cpu, steps[0].thread)
        return divide(spans, [span_of(step) for step in steps])
    # copies of marks are no work
    work = [
        event
        for event in ordered
        if event.device_type != DeviceType.CPU and not event.is_user_annotation
    ]
    if all(event.name.startswith(COPY) for event in work):
        raise ValueError(
            "there are no kernels: the driver or another profiler keeps torch's from the GPU"
        )
    return divide(spans_on_gpu(on_cpu, work), [span_of(step) for step in steps])


def span_of(event: FunctionEvent, kind: str = "", name: str = "") -> Span:
    """Return the time of an event, whose clock counts microseconds."""
    time = event.time_range
    return Span(round(1000 * time.start), round(1000 * time.end), kind, name)


def names_of(event: FunctionEvent) -> list[str]:
    """Return the names of the events around an event of a CPU, outermost first, and its own."""
    around = names_of(event.cpu_parent) if event.cpu_parent else []
    return [*around, event.name]


def spans_on_cpu(events: Iterable[FunctionEvent], main_thread: int) -> Iterator[Span]:
    """Yield what the main thread does, and what any thread sends. A span lies over those before it."""
    for event in events:
        if SENDS.search(event.name):
            yield span_of(event, COMMUNICATION)
        if event.thread != main_thread or event.is_async:
            continue
        names = names_of(event)
        kind = DATA if DATA in names else class_of(names)
        # a mark of the trainer or of torch, such as DistributedDataParallel.forward: Python between operators
        if kind == OTHER and event.is_user_annotation:
            kind = GAPS
        yield span_of(event, kind, name_of(names, kind))


def spans_on_gpu(on_cpu: Iterable[FunctionEvent], work: Iterable[FunctionEvent]) -> Iterator[Span]:
    """Yield waits for data, then copies, then kernels of all streams. A span lies over those before it."""
    launchers: dict[int, list[str]] = {}  # a kernel and the call that launched it have one number
    for event in on_cpu:
        if LAUNCH.match(event.name):
            launchers[event.id] = names_of(event)[:-1]
        elif event.name == DATA:
            yield span_of(event, DATA)
    # while two kernels run, the time is that of the one that began first
    for event in sorted(
        work, key=lambda event: (not event.name.startswith(COPY), -event.time_range.start)
    ):
        names = [*launchers.get(event.id, ()), event.name]
        kind = COMMUNICATION if SENDS.search(event.name) else class_of(names)
        yield span_of(event, kind, name_of(names, kind))


def class_of(names: Sequence[str]) -> str:
    """Return the class of what runs inside these names, outermost first; GAPS if it waits for other processes."""
    if any(OPTIMIZER.search(name) for name in names):
        return "optimizer"
    if SENDS.search(names[-1]):
        return GAPS
    in_loss = any(LOSS in name for name in names)
    if not in_loss and any(ATTENTION.search(name) for name in names):
        return "attention"
    if any(MATMUL.search(name) for name in names):
        return "matmul"
    return "loss" if in_loss else OTHER


def name_of(names: Sequence[str], kind: str) -> str:
    """Return what to call it: a kernel is called after its operator, unless its own name says more."""
    if kind == "matmul" and any(LOSS in name for name in names):
        return HEAD
    if COMPILED_CALL.match(names[-1]):
        return "calls of compiled code"
    for name in reversed(names):
        if name.startswith(("aten::", "triton_", "Mem")):
            return name
    return names[-1][:70]


def divide(spans: Iterable[Span], steps: Sequence[Span]) -> Shares:
    """Give each nanosecond of the steps to the last span that covers it, and to communication if no work covers it.

    steps: in order, without overlap.
    """
    owners = [Span(0, 0, GAPS), Span(0, 0, COMMUNICATION), *spans]
    times = [(span.begin, span.end) for span in (*owners, *steps)]
    edges, places = np.unique(times, return_inverse=True)
    places = places.reshape(-1, 2)
    owner = np.zeros(len(edges), int)  # of the time from each edge to the next
    sends = np.zeros(len(edges), bool)
    in_step = np.zeros(len(edges), bool)
    for number, (begin, end) in enumerate(places):
        if number >= len(owners):
            in_step[begin:end] = True
        elif owners[number].kind == COMMUNICATION:
            sends[begin:end] = True
        else:
            owner[begin:end] = number

    works = np.array([span.kind not in (GAPS, DATA) for span in owners])[owner]
    owner[sends & ~works] = 1
    length = np.diff(edges, append=edges[-1]) * in_step
    by_class, others, head_ns = dict.fromkeys(CLASSES, 0.0), Counter[str](), 0.0
    for span, ns in zip(owners, np.bincount(owner, length, len(owners)).tolist(), strict=True):
        by_class[span.kind] += ns
        if span.kind == OTHER:
            others[span.name] += ns
        if span.name == HEAD:
            head_ns += ns
    wall_ns = int(length.sum())
    hidden_ns = float(length[sends & works].sum())
    return Shares(len(steps), wall_ns, by_class, others, head_ns, hidden_ns)
