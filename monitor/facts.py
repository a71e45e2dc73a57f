"""What the monitor knows at one moment: plain values, the same whether they were read here or told by a pod.

    a node of this machine (local.py) ----\
    lines that pods print (pod_agent.py) ----+-> Seen -> rules say what is wrong, the screen shows all of it
    Kubernetes (cluster.py) -------------/

None, or an empty tuple, is what is not known: never a guess, and never 0. Nothing here reads or writes anything.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from k8s.cluster.log_lines import POD_LINE

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Gpu:
    """throttle: why its clocks are lower than they could be (readings.REASONS), without "idle"."""

    index: int
    name: str = ""
    utilisation_percent: float | None = None
    memory_gib: float | None = None
    memory_total_gib: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temp_c: float | None = None
    clock_mhz: float | None = None
    throttle: tuple[str, ...] = ()
    lost: bool = False  # it was there, and no longer answers
    clock_max_mhz: float | None = None
    training_w: float | None = (
        None  # what it drew as long as steps were made: its median, where that is known
    )


@dataclasses.dataclass(frozen=True)
class Link:
    """A network interface, and what goes through it."""

    name: str
    in_bytes_per_s: float | None = None
    out_bytes_per_s: float | None = None
    speed_bytes_per_s: float | None = None  # of one direction, as the system says


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is, from its record. Rates and medians are of the last steps of this attempt (tail.RECENT), without
    its first; times are Unix seconds."""

    step: int = 0
    tokens: int = 0
    last_step: int | None = None
    attempt: int = 0
    started: float | None = None  # the run, for the first time
    attempt_started: float | None = None
    step_time: float | None = None  # when the last step was recorded
    loss: float | None = None  # of the last step that had one
    median_loss: float | None = None
    nonfinite_steps: int = (
        0  # of the recent ones, skipped for a loss or gradient that was not finite
    )
    skipped_steps: int = 0  # of the recent ones, for any reason
    rollbacks: int = 0  # of this attempt
    step_s: float | None = None  # median
    tokens_per_s: float | None = None  # over the recent steps, by their own step_ms
    mfu_percent: float | None = None
    data_wait_fraction: float | None = None  # of the recent steps' time
    mem_gib: float | None = None  # the largest rank's peak, latest
    val_loss: float | None = None
    val_step: int | None = None
    eval_s: float | None = None  # what the last one took
    checkpoint_step: int | None = None
    checkpoint_time: float | None = None
    checkpoint_bytes: float | None = None
    goodput: Mapping[str, float] = dataclasses.field(
        default_factory=dict
    )  # category -> seconds (record/goodput.py)
    end_reason: str = ""  # done, stopped or crashed, where the record has ended
    straggler: Mapping[str, Any] = dataclasses.field(
        default_factory=dict
    )  # of the last step with one, and "step"
    ready: float | None = None  # when this attempt could train: its start-up was over
    recent_steps: int | None = None  # of which rates and medians are
    processes: int | None = None  # of this attempt, on all nodes
    rested_s: float | None = None  # of goodput's "down", after attempts that were told to stop
    damaged_lines: int | None = None  # of the record, which are left out


@dataclasses.dataclass(frozen=True)
class Node:
    """What a machine, or a pod, tells of itself. status: STATUS.json as it is; stage: what the job's script is at where
    no trainer speaks, "" where nothing is; at_work: None where it cannot be known (another machine's run)."""

    node: int
    host: str
    time: float  # Unix seconds, when it looked
    status: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stage: str = ""
    at_work: bool | None = None
    progress: Progress | None = None
    gpus: tuple[Gpu, ...] = ()
    gpus_time: float | None = None  # when they were read
    gpus_why: str = ""  # why there are none
    links: tuple[Link, ...] = ()
    disk_free_bytes: float | None = None  # where the run is written
    memory_bytes: float | None = None  # of the host or the container, in use
    memory_limit_bytes: float | None = None
    complaint: str = ""  # the last line of its log that complains, "" where none of this attempt
    energy_j: float | None = (
        None  # that its GPUs took since energy_since (Unix seconds), by their counters
    )
    energy_since: float | None = None
    left_out: tuple[
        str, ...
    ] = ()  # what it knew and did not tell, as the line would have been too long
    disk_passing_bytes: float | None = (
        None  # beside those free, of a checkpoint that is being written or deleted
    )


@dataclasses.dataclass(frozen=True)
class Asks:
    """What a pod asks for, which settings of today may no longer say. gpus: by the name of the resource; memory and
    disk as Kubernetes writes them; secret: with which its image is fetched."""

    gpus: int | None = None
    resource: str = ""
    products: tuple[str, ...] = ()
    memory: str = ""
    disk: str = ""
    claim: str = ""
    secret: str = ""


@dataclasses.dataclass(frozen=True)
class Pod:
    """A pod of the run's Job, the newest of its index. phase: k8s/words.phase. waiting: the reason of Kubernetes for
    which its container waits; disrupted: that for which the pod was taken away. message: what it says of that
    container, or of the pod; said: its events, "Reason: message", newest last, whole as well. made: when the pods of
    its index were, of those that are still listed, oldest first. before: the one of its index before this. Times are
    Unix seconds."""

    index: int
    name: str
    phase: str
    node: str = ""
    site: str = ""
    restarts: int = 0
    created: float | None = None
    scheduled: float | None = None
    pulling_since: float | None = None
    pulled: float | None = None
    waiting: str = ""
    unschedulable: str = ""  # the scheduler's message
    trouble: str = ""  # k8s/words.trouble
    exit_code: int | None = None
    oom_killed: bool = False
    image: str = ""
    last_line: str = ""
    last_line_time: float | None = None
    lines: tuple[str, ...] = ()  # the last ones, without what it tells of its node
    disrupted: str = ""
    asks: Asks = Asks()
    message: str = ""
    said: tuple[str, ...] = ()
    made: tuple[float, ...] = ()
    ended: float | None = None
    before: "Pod | None" = None


@dataclasses.dataclass(frozen=True)
class Cluster:
    """job: its state in words (k8s/words.state); ended: "", "Complete" or "Failed". events: newest last, of pods that
    do not run. quota: what Kubernetes said where it let a pod not be made. wanted_pods: 0 where there is no such Job.
    run: whose Job it is; another's pods and nodes are left out. tunes: whether its pods fine-tune. Where there is a
    problem, the rest is as it was when Kubernetes last answered, which is `asked`, Unix seconds."""

    words: str
    job_name: str
    job: str
    ended: str = ""
    wanted_pods: int = 1
    pods: tuple[Pod, ...] = ()
    events: tuple[str, ...] = ()
    quota: str = ""
    problem: str = ""  # why nothing could be asked, in words
    unread: str = ""  # why the pods' logs, or some of them, could not be read, in words
    exit_code: int | None = None  # that failed the Job (k8s/words.exit_code)
    run: str = ""
    asked: float | None = None
    tunes: bool = False


@dataclasses.dataclass(frozen=True)
class Expected:
    """What the plan computes for this run on these devices; None where it cannot. needs_gib: weights, gradients and
    moments of one process, without which no step is possible; wan_bytes_per_step: that leave a site, or a node."""

    tokens_per_s: float | None = None
    mfu_percent: float | None = None
    why: str = ""
    step_s: float | None = None
    needs_gib: float | None = None
    memory_gib: float | None = None
    bytes_per_step: float | None = None
    link_bytes_per_s: float | None = None
    checkpoint_bytes: float | None = None
    save_every_s: float | None = None
    end: float | None = None  # Unix seconds, by the plan from the first start
    eval_s: float | None = None
    phases: tuple[
        tuple[str, float], ...
    ] = ()  # of STATUS.json, seconds that it took at an earlier start
    limits: tuple[
        tuple[str, float], ...
    ] = ()  # of STATUS.json, seconds after which a rule calls it too long


@dataclasses.dataclass(frozen=True)
class Seen:
    """All of it. nodes: by number; of a run here there is one at least."""

    now: float
    run: str
    preset: str
    nodes: tuple[Node, ...] = ()
    cluster: Cluster | None = None
    expected: Expected = dataclasses.field(default_factory=Expected)
    since: float | None = None  # when this monitor began to watch, Unix seconds
    named: str = ""  # settings by which a command finds it here: RUNS_DIR=/data RUN_NAME=big

    @property
    def first(self) -> Node | None:
        """The node that keeps the run's record."""
        return next((node for node in self.nodes if node.node == 0), None)

    @property
    def progress(self) -> Progress | None:
        return self.first.progress if self.first else None

    @property
    def phase(self) -> str:
        """As STATUS.json has it; "" where nothing told one."""
        return str(self.first.status.get("phase", "")) if self.first else ""


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that is wrong. name: of the rule; about: which node, pod or GPU, "" for the run; text: a
    sentence; next: the command or setting to try. failing: it will not mend itself."""

    name: str
    text: str
    next: str
    about: str = ""
    failing: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """By which it is the same fault at the next look."""
        return self.name, self.about


# ---------------------------------------------------------------------------------------------------
# A node in a line
# ---------------------------------------------------------------------------------------------------


def to_line(node: Node) -> str:
    """For the log of a pod; what is not known is left out."""
    return POD_LINE + json.dumps(
        {"schema": SCHEMA, **sparse(dataclasses.asdict(node))},
        separators=(",", ":"),
        allow_nan=False,
    )


def of_line(line: str) -> Node | None:
    """What to_line() made, wherever in the line it begins; None for any other, a torn one, and another schema."""
    _, told, text = line.partition(POD_LINE)
    if not told:
        return None
    try:
        values = json.loads(text)
        if values.pop("schema") != SCHEMA:
            return None
        progress = values.pop("progress", None)
        gpus = tuple(
            Gpu(**known(Gpu, gpu) | {"throttle": tuple(gpu.get("throttle", ()))})
            for gpu in values.pop("gpus", ())
        )
        links = tuple(Link(**known(Link, link)) for link in values.pop("links", ()))
        left_out = tuple(values.pop("left_out", ()))
        return Node(
            **known(Node, values),
            gpus=gpus,
            links=links,
            left_out=left_out,
            progress=Progress(**known(Progress, progress)) if progress is not None else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def sparse(values: dict[str, Any]) -> dict[str, Any]:
    """Without what is None or empty; of values inside too."""
    found = {}
    for key, value in values.items():
        if isinstance(value, dict):
            value = sparse(value) if key in ("progress", "goodput") else value
        elif isinstance(value, list | tuple):
            value = [sparse(each) if isinstance(each, dict) else each for each in value]
        if value is not None and value != "" and value != [] and (value != {} or key == "progress"):
            found[key] = value
    return found


def known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that this version knows: keys may be added without another schema."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {key: value for key, value in values.items() if key in names}
