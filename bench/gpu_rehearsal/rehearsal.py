"""One case of the rehearsal: what a run does on its GPUs, from joining to generated text, and what must be true.

    join -> build, optimizer, engine -> dry run -> two steps -> evaluation -> generation

Everything but the data is the code that training calls. See fake_cuda.py for what takes the place of the GPUs.
"""

import dataclasses
import types
from typing import Any
from unittest import mock

import numpy as np

from bench.gpu_rehearsal.fake_cuda import Gpu, Machine, Tracker  # before torch

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
from train.optim import Optimizer, build_optimizer
from train.step import clock_of, dry_run, train_step

CAPABILITIES = {"rtx4090": (8, 9), "a100-80gb-sxm": (8, 0), "h100-sxm": (9, 0)}
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
        kernel: of attention, by the name that a run logs; kernels: that torch chose for it in a step.
    """

    peak_bytes: int
    planned_bytes: float
    moment: str
    operation: str
    kernel: str
    kernels: tuple[str, ...]

    @property
    def plan_error(self) -> float:
        """What the plan is off by, as a part of the peak; negative: too little."""
        return self.planned_bytes / self.peak_bytes - 1


def rehearse(config: Config) -> Result:
    """Run a case on the CARDS of its settings. Raises Untrue, or whatever the code raises."""
    fleet = fleet_of(config)
    card = fleet.smallest
    gpu = Gpu(f"NVIDIA {card.names[0]}", CAPABILITIES[card.key], int(card.memory_gib * 2**30))
    with launched(fleet.processes), Machine(gpu, fleet.processes) as machine:
        world = worlds.join(config)
        worlds.log_topology(world)
        expect("the device", world.device, torch.device("cuda", 0))
        with machine.fake_tensors() as tracker:
            return run(config, fleet, world, tracker)


def launched(processes: int) -> Any:
    """Set the environment that the launcher makes for the first of these processes."""
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0}
    numbers |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    return mock.patch.dict("os.environ", {name: str(value) for name, value in numbers.items()})


def run(config: Config, fleet: Fleet, world: World, tracker: Tracker) -> Result:
    attempt: Any = types.SimpleNamespace(config=config, world=world, before={})
    model = assemble.build_model(attempt, "")
    optimizer = build_optimizer(model, config)
    engine = parallel.parallelize(model, config, world)
    worlds.set_timeout(assemble.COLLECTIVE_S, parallel.groups_of(engine))
    loader = blank_loader(config, world)
    dry_run(engine, optimizer, loader.blank())

    tracker.peak_bytes = 0
    tracker.kernels.clear()
    take_steps(engine, optimizer, loader, tracker)
    planned = run_of(config, fleet).memory
    result = Result(
        tracker.peak_bytes,
        planned.total - planned.parts["other"],
        planned.moment,
        tracker.peak_operation,
        model.kernel.name,
        tuple(tracker.kernels),
    )
    check_types(engine, optimizer)
    evaluate(engine, config, world, tracker)
    generate_text(parallel.unwrap(engine), config)
    return result


# ---------------------------------------------------------------------------------------------------
# What a run does
# ---------------------------------------------------------------------------------------------------


def blank_loader(config: Config, world: World) -> Loader:
    """Return a loader without shards."""
    loader = Loader.__new__(Loader)
    loader.config = config
    loader.world = world
    loader.end_of_text = END_OF_TEXT
    loader.micro_batch = config.micro_batch(world.size)
    return loader


def take_steps(engine: nn.Module, optimizer: Optimizer, loader: Loader, tracker: Tracker) -> None:
    config, world = loader.config, loader.world
    clock = clock_of(engine, world.device)
    count = config.batch_windows // world.size
    for _ in range(STEPS):
        clock.start()
        windows = np.ones((count, config.seq_len + 1), dtype=np.int64)
        parts = loader.micro_batches(windows, loader.micro_batch)
        reads = tracker.reads
        numbers = train_step(
            engine,
            optimizer,
            Batch(parts, float(windows.size * world.size), range(count)),
            config.grad_clip,
            world,
            clock=clock,
        )
        del parts
        expect("reads of the GPU in a step", tracker.reads - reads, 1)
        expect("why the step was skipped", numbers.skipped, None)


def evaluate(engine: nn.Module, config: Config, world: World, tracker: Tracker) -> None:
    """Score one batch of one source."""
    evaluator = Evaluator.__new__(Evaluator)
    evaluator.config = config
    evaluator.world = world
    evaluator.end_of_text = END_OF_TEXT
    evaluator.sources = {"text": None}  # type: ignore[dict-item]  # it reads none
    evaluator.byte_lengths = np.ones(config.padded_vocab_size)
    tokens = np.ones((config.micro_batch(world.size), config.seq_len), dtype=np.int64)
    batches = iter([("text", tokens, tokens)])
    engine.eval()
    with (
        mock.patch.object(evaluator, "read_batches", return_value=batches),
        mock.patch.object(scoring, "describe", raise_error),
    ):
        expect("whether the evaluation was interrupted", evaluator(engine) is None, False)
    engine.train()


def raise_error(error: Exception, *_: Any) -> None:
    """Raise what would only cost a run its evaluation."""
    raise error


def generate_text(model: Any, config: Config) -> None:
    """Generate for two texts of different length, with each way to choose a token."""
    vocabulary: Any = types.SimpleNamespace(size=config.vocab_size, end_of_text=END_OF_TEXT)
    texts = [[5, 6, 7], [5]]
    ways = (generate.Choice(), generate.Choice(temperature=0), generate.Choice(top_k=0, top_p=0.9))
    for way in ways:
        tokens = list(generate.generate(model, texts, GENERATED, way, [1, 2], vocabulary))
        expect("generated tokens", len(tokens), GENERATED)


# ---------------------------------------------------------------------------------------------------
# What must be true
# ---------------------------------------------------------------------------------------------------


def expect(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise Untrue(f"{what}: expected {expected}, found {found}")


def check_types(engine: nn.Module, optimizer: Optimizer) -> None:
    """Weights and moments are float32 on the GPU."""
    for name, weight in parallel.weights_of(engine).items():
        expect_float32(name, weight)
        moments = optimizer.moments(weight)
        expect(f"moments of {name}", tuple(moments), optimizer.state_names(weight))
        for moment, value in moments.items():
            expect_float32(f"{moment} of {name}", value)


def expect_float32(name: str, tensor: Tensor) -> None:
    expect(f"type of {name}", tensor.dtype, torch.float32)
    expect(f"device of {name}", tensor.device.type, "cuda")


def check_plan(result: Result) -> None:
    """The plan and the tracker agree."""
    if abs(result.plan_error) > PLAN_TOLERANCE:
        raise Untrue(f"memory as planned: expected within {PLAN_TOLERANCE:.0%}")
