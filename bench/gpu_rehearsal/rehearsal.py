"""One case of the rehearsal: what a run does on its GPUs, from joining to generated text, and what must be true.

    join -> build, optimizer, engine -> dry run -> two steps -> evaluation -> generation

Everything but the data is the code that training calls. finetuning.py has what differs in fine-tuning, fake_cuda.py what
takes the place of the GPUs.
"""

import contextlib
import dataclasses
import types
from typing import Any
from unittest import mock

import numpy as np

from bench.gpu_rehearsal.fake_cuda import Compiler, Gpu, Machine, Tracker  # before torch
from bench.gpu_rehearsal.finetuning import Finetuning, blank, model_folder

import torch  # isort: skip
from torch import Tensor, nn

from plan.fleet import Fleet, fleet_of
from plan.run import run_of
from settings.config import Config
from train import assemble
from train.data.batch import Batch, Loader
from train.distributed import parallel
from train.distributed import world as worlds
from train.distributed.world import World
from train.evaluate import scoring
from train.evaluate.validation import Evaluator
from train.model import generate
from train.model.model import Transformer
from train.optim import Optimizer, build_optimizer
from train.step import clock_of, dry_run, train_step

# Compute capability, multiprocessors, threads of each, shared memory for a block of threads (CUDA's programming guide)
KIB = 2**10
CARDS: dict[str, tuple[Any, ...]] = {
    "rtx4090": ((8, 9), 128, 1536, 99 * KIB),
    "a100-80gb-sxm": ((8, 0), 108, 2048, 163 * KIB),
    "h100-sxm": ((9, 0), 132, 2048, 227 * KIB),
}
STEPS = 2  # the second finds moments and gradients' memory as the first left them
GENERATED = 4  # tokens
PLAN_TOLERANCE = 0.03  # of the peak
END_OF_TEXT = 0


class Untrue(Exception):
    """Something that must be true of a case is not. The message says what was expected, and what was found."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a case found.

    Attributes:
        peak_bytes: most that was held on the GPU in a step.
        planned_bytes: what the plan says of that, without its part "other", which is no tensor of a step.
        moment: of the step, by the plan; operation: by the tracker.
        kernels: of attention, that torch chose in a step; () for documents and examples that are kept apart.
        compiled: what was compiled. The traced graphs run operation by operation then, and their peak is no program's.
    """

    peak_bytes: int
    planned_bytes: float
    moment: str
    operation: str
    kernels: tuple[str, ...]
    compiled: Compiler | None

    @property
    def plan_error(self) -> float:
        """What the plan is off by, as a part of the peak; negative: too little."""
        return self.planned_bytes / self.peak_bytes - 1


def rehearse(config: Config) -> Result:
    """Run a case on the CARDS of its settings. Raises Untrue, or whatever the code raises."""
    fleet = fleet_of(config)
    card = fleet.smallest
    memory_bytes = int(card.memory_gib * 2**30)
    gpu = Gpu(f"NVIDIA {card.names[0]}", memory_bytes, *CARDS[card.key])
    with (
        launched(fleet.processes),
        model_folder(config) as config,
        Machine(gpu, fleet.processes) as machine,
    ):
        world = worlds.join(config)
        worlds.log_topology(world)
        expect("the device", world.device, torch.device("cuda", 0))
        compiler = Compiler(gpu) if config.compile == "1" else contextlib.nullcontext()
        with machine.fake_tensors() as tracker, compiler as compiled:
            return run(config, fleet, world, tracker, compiled)


def launched(processes: int) -> Any:
    """Set the environment that the launcher makes for the first of these processes."""
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0}
    numbers |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    return mock.patch.dict("os.environ", {name: str(value) for name, value in numbers.items()})


def run(
    config: Config, fleet: Fleet, world: World, tracker: Tracker, compiled: Compiler | None
) -> Result:
    path = (Finetuning if config.model else Pretraining)(config, world)
    model = path.build()
    optimizer = build_optimizer(model, config)
    engine = parallel.parallelize(model, config, world)
    worlds.set_timeout(assemble.COLLECTIVE_S, parallel.groups_of(engine))
    dry_run(engine, optimizer, path.loader.blank())

    tracker.peak_bytes = 0
    take_steps(path, engine, optimizer, tracker)
    planned = run_of(config, fleet).memory
    result = Result(
        tracker.peak_bytes,
        planned.total - planned.parts["other"],
        planned.moment,
        tracker.peak_operation,
        tuple(tracker.kernels),
        compiled,
    )
    check_types(engine, optimizer, getattr(torch, config.dtype))
    evaluate(path.evaluator, engine)
    path.generate(parallel.unwrap(engine))
    return result


# ---------------------------------------------------------------------------------------------------
# What a run does
# ---------------------------------------------------------------------------------------------------


class Pretraining:
    """What pretraining has of its own."""

    def __init__(self, config: Config, world: World):
        self.config = config
        self.world = world
        size = config.micro_batch(world.size)
        common = {"config": config, "world": world, "end_of_text": END_OF_TEXT}
        self.loader = blank(Loader, **common, micro_batch=size)
        tokens = np.ones((size, config.seq_len), dtype=np.int64)
        self.evaluator = blank(
            Evaluator,
            **common,
            sources={"text": None},  # it reads none
            byte_lengths=np.ones(config.padded_vocab_size),
            read_batches=lambda *_: iter([("text", tokens, tokens)]),
        )

    def build(self) -> Transformer:
        attempt: Any = types.SimpleNamespace(config=self.config, world=self.world, before={})
        return assemble.build_model(attempt, "")

    def micro_batches(self, count: int) -> list[tuple[Tensor, ...]]:
        windows = np.ones((count, self.config.seq_len + 1), dtype=np.int64)
        return self.loader.micro_batches(windows, self.loader.micro_batch)

    def generate(self, model: Any) -> None:
        """Generate for two texts of different length, with each way to choose a token."""
        vocabulary: Any = types.SimpleNamespace(
            size=self.config.vocab_size, end_of_text=END_OF_TEXT
        )
        texts = [[5, 6, 7], [5]]
        choices = (
            generate.Choice(),
            generate.Choice(temperature=0),
            generate.Choice(top_k=0, top_p=0.9),
        )
        for choice in choices:
            tokens = list(generate.generate(model, texts, GENERATED, choice, [1, 2], vocabulary))
            expect("generated tokens", len(tokens), GENERATED)


def take_steps(path: Any, engine: nn.Module, optimizer: Optimizer, tracker: Tracker) -> None:
    config, world = path.config, path.world
    clock = clock_of(engine, world.device)
    count = config.batch_windows // world.size
    scored = float(config.batch_windows * config.seq_len)
    for _ in range(STEPS):
        clock.start()
        batch = Batch(path.micro_batches(count), scored, range(count))
        reads = tracker.reads
        numbers = train_step(engine, optimizer, batch, config.grad_clip, world, clock=clock)
        del batch
        expect("reads of the GPU in a step", tracker.reads - reads, 1)
        expect("why the step was skipped", numbers.skipped, None)
    # else a slow rank is not told from those that wait for it
    expect("whether collectives are timed", clock.waited_s > 0, parallel.is_fsdp(engine))


def evaluate(evaluator: Any, engine: nn.Module) -> None:
    engine.eval()
    with mock.patch.object(scoring, "describe", raise_error):
        expect("whether the evaluation was interrupted", evaluator(engine) is None, False)
    engine.train()


def raise_error(error: Exception, *_: Any) -> None:
    """Raise what would only cost a run its evaluation."""
    raise error


# ---------------------------------------------------------------------------------------------------
# What must be true
# ---------------------------------------------------------------------------------------------------


def expect(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise Untrue(f"{what}: expected {expected}, found {found}")


def check_types(engine: nn.Module, optimizer: Optimizer, dtype: torch.dtype) -> None:
    """What is trained and its moments are float32 on the GPU, and what is frozen has DTYPE."""
    for name, weight in engine.named_parameters():
        if not weight.requires_grad:
            expect_type(name, weight, dtype)
    for name, weight in parallel.weights_of(engine).items():
        expect_type(name, weight)
        moments = optimizer.moments(weight)
        expect(f"moments of {name}", tuple(moments), optimizer.state_names(weight))
        for moment, value in moments.items():
            expect_type(f"{moment} of {name}", value)


def expect_type(name: str, tensor: Tensor, dtype: torch.dtype = torch.float32) -> None:
    expect(f"type of {name}", tensor.dtype, dtype)
    expect(f"device of {name}", tensor.device.type, "cuda")


def check_plan(result: Result) -> None:
    """The plan and the tracker agree."""
    if not result.compiled and abs(result.plan_error) > PLAN_TOLERANCE:
        raise Untrue(f"memory as planned: expected within {PLAN_TOLERANCE:.0%}")
