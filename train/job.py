"""All that training needs, in one place: built by assemble.py, passed to what trains, saves and recovers."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

from hardware.flops import flops_per_token, mfu, peak_tflops
from record.recorder import Recorder
from record.run_paths import RunPaths
from record.status import Status
from settings.config import Config
from train.checkpoint.identity import Identity
from train.checkpoint.saver import Saver
from train.data.batch import Loader
from train.data.mixture import Gap
from train.data.tokenizer import Vocabulary
from train.distributed.parallel import unwrap
from train.distributed.signals import Interrupt
from train.distributed.world import World
from train.faults.deadlines import Deadlines
from train.faults.guard import Guard
from train.faults.recovery import Recovery
from train.hooks.hook import Hook
from train.model.model import matmul_weights
from train.optim import Optimizer
from train.step import StepNumbers


class Rates:
    """Turns a step's time into throughput and utilisation.

    Args:
        flops: of a token, with full and with causal attention.

    Attributes:
        sites: that take part now, of config.replicas.
    """

    def __init__(self, config: Config, world: World, flops: tuple[float, float]):
        self.tokens = config.batch_tokens
        self.devices = world.size * config.replicas
        self.replicas = config.replicas
        self.sites = config.replicas
        self.flops, self.flops_causal = flops
        self.peak = peak_tflops(world.device_name, config.dtype)

    def of_step(self, numbers: StepNumbers, seconds: float) -> dict[str, Any]:
        """Return the step record's values (record/metrics.py has their units)."""
        tokens_per_s = self.tokens / seconds * self.sites / self.replicas
        devices = self.devices // self.replicas * self.sites
        return {
            "loss": numbers.loss,
            "grad_norm": numbers.grad_norm,
            "step_ms": 1000 * seconds,
            "tokens_per_s": tokens_per_s,
            "mfu": mfu(tokens_per_s, self.flops, devices, self.peak),
            "mfu_causal": mfu(tokens_per_s, self.flops_causal, devices, self.peak),
            "mem_gib": numbers.mem_gib,
        }


def count_flops(config: Config, model: nn.Module) -> tuple[float, float]:
    """FLOPs of a token, with full and with causal attention, of a model all of whose weights are trained."""
    shape = (matmul_weights(unwrap(model)), config.n_layer, config.n_embd, config.seq_len)
    return flops_per_token(*shape), flops_per_token(*shape, causal=True)


@dataclasses.dataclass
class Job:
    """A run that is being trained.

    Attributes:
        requests: what this rank asks for at the next step, in addition to what its hooks do then: "save".
        step: committed optimizer steps.
        waited_s: that hooks waited for the data of the next step.
    """

    config: Config
    paths: RunPaths
    world: World
    model: nn.Module
    optimizer: Optimizer
    loader: Loader
    data_fingerprint: str
    identity: Identity
    vocabulary: Vocabulary
    recorder: Recorder
    status: Status
    interrupt: Interrupt
    deadlines: Deadlines
    saver: Saver
    recovery: Recovery
    rates: Rates
    hooks: list[Hook] = dataclasses.field(default_factory=list)
    requests: set[str] = dataclasses.field(default_factory=set)
    step: int = 0
    waited_s: float = 0.0

    @property
    def guard(self) -> Guard:
        return self.recovery.guard

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """Samples that are skipped, in the order of the run."""
        return self.recovery.gaps

    @property
    def tokens(self) -> int:
        return self.step * self.config.batch_tokens

    @property
    def shares(self) -> dict[str, dict[str, float]]:
        """What of each source the weights have seen (batch.Loader.shares)."""
        return self.loader.shares(self.step, self.gaps)

    def all_requests(self) -> set[str]:
        """What this rank asks for in the step that begins, "stop" included."""
        stop = {"stop"} if self.interrupt.asked is not None else set()
        return self.requests | stop

    @contextlib.contextmanager
    def activity(
        self, doing: str, limit_s: float, setting: str = "", phase: str = ""
    ) -> Iterator[None]:
        """Do something else than a step, for which the other ranks may have to wait.

        Args:
            doing: what it is called where it hangs.
            limit_s: seconds without progress after which it hangs.
            setting: the one that decides how long.
            phase: of STATUS.json meanwhile.
        """
        before = str(self.status.facts.get("phase", ""))
        with self.deadlines.allow(doing, limit_s, setting):
            if phase:
                self.status.phase(phase)
            yield
        if phase:  # not where it failed: the status then says what was being done
            self.status.phase(before)
