"""What one process does in an optimizer step, as far as its memory depends on it."""

import dataclasses
from functools import cached_property

from hardware.model_size import flops_of
from plan.finetuning.tuned import FLOAT, Tuned, item_bytes
from settings.config import Config

# That of compilation.py, which imports torch; a test holds them equal.
FLOPS_WORTH_COMPILING_ON_CPU = 5e13


@dataclasses.dataclass(frozen=True)
class Implementation:
    """The coefficients in which ways to compute a block differ.

    Attributes:
        norm_input: bytes of each number that a norm reads, where it keeps them beside its result.
        mlp: numbers that an MLP keeps for each of its width, those that its last product reads aside.
        keeps_inputs: whether what products read is kept, or made anew in the backward pass.
    """

    norm_input: int
    mlp: int
    keeps_inputs: bool = True


EAGER = Implementation(norm_input=FLOAT, mlp=3)  # transformers' classes are written alike
EAGER_ON_CPU = Implementation(norm_input=0, mlp=3)  # with the norm of cpu_kernels.py
COMPILED = Implementation(norm_input=0, mlp=2)
COMPILED_ON_CPU = Implementation(norm_input=0, mlp=2, keeps_inputs=False)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of one of `processes` processes, of which a node has `node_processes`.

    Attributes:
        model: the model with what is trained of it, and the settings.
        is_ours: whether train/model computes it; else transformers does.
    """

    model: Tuned
    is_ours: bool
    processes: int
    node_processes: int
    on_cpu: bool

    @property
    def config(self) -> Config:
        return self.model.c

    @property
    def item(self) -> int:
        """Bytes of a number in DTYPE."""
        return item_bytes(self.config)

    @property
    def windows(self) -> int:
        """Of this process in a step."""
        return self.config.batch_windows // self.processes

    @cached_property
    def micro_batch(self) -> int:
        return max(1, self.config.micro_batch(self.processes))

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.micro_batch * self.config.seq_len

    @property
    def accumulates(self) -> bool:
        """Whether a step has several micro-batches."""
        return self.windows > self.micro_batch

    @property
    def together(self) -> int:
        """Processes that take every step together: under SYNC=diloco those of one site."""
        return self.processes // self.config.replicas

    @cached_property
    def shards(self) -> int:
        """Processes that share one copy of the weights."""
        if self.together == 1 or self.config.parallel == "ddp":
            return 1
        if self.config.parallel == "fsdp":
            return self.together
        return self.config.shard_ranks or self.node_processes

    @property
    def is_sharded(self) -> bool:
        return self.shards > 1

    @property
    def trains_all(self) -> bool:
        """Whether all weights are trained. If not, only adapters are (LORA_RANK above 0)."""
        return not self.model.lora

    @property
    def drops(self) -> bool:
        """Whether adapters read what dropout has left of their input."""
        return self.model.lora and self.config.lora_dropout > 0

    @property
    def autocasts(self) -> bool:
        """Whether torch's autocast makes copies in DTYPE of what products read."""
        return not self.is_ours and self.item < FLOAT and not self.is_sharded

    @property
    def joins_examples(self) -> bool:
        """Whether packed examples are attended to one by one (packed_attention.py)."""
        return not self.is_ours and (self.on_cpu or self.item == FLOAT)

    @property
    def casts_weights(self) -> bool:
        """Whether weights are copied to DTYPE where they are used; FSDP2 gathers them in it."""
        return self.item < self.model.base_bytes and not self.is_sharded

    @property
    def stream(self) -> int:
        """Bytes of a number of the residual stream, which has the type of the embedding."""
        return FLOAT if self.autocasts and self.trains_all else self.item

    @property
    def adapter_item(self) -> int:
        """Bytes of a number that an adapter reads: peft makes it float32 before autocast."""
        return FLOAT if self.autocasts else self.item

    @cached_property
    def is_compiled(self) -> bool:
        """As compilation.wanted decides where a compiler is there."""
        config = self.config
        if not self.is_ours or config.compile != "auto":
            return self.is_ours and config.compile == "1"
        work = config.last_step * config.batch_tokens * flops_of(config)
        return not self.on_cpu or work >= FLOPS_WORTH_COMPILING_ON_CPU

    @property
    def eager_code(self) -> Implementation:
        """Of what is never compiled: the last norm."""
        return EAGER_ON_CPU if self.is_ours and self.on_cpu else EAGER

    @cached_property
    def code(self) -> Implementation:
        """Of the blocks."""
        if not self.is_compiled:
            return self.eager_code
        keeps_all = self.config.activation_checkpointing == "none"
        return COMPILED_ON_CPU if self.on_cpu and keeps_all else COMPILED
