"""What is run: the shape of a model, and of the batch that one step takes. Standard library only."""

import dataclasses

from hardware.flops import flops_per_token


@dataclasses.dataclass(frozen=True)
class Shape:
    """n_layer blocks, n_embd wide; sequences x seq_len tokens are one step's batch. The head is tied.

    micro_batches: of that size, which a step of a whole run has (whole_run.py): presets have 4 to 32 of them on a GPU.
    """

    name: str
    n_layer: int
    n_embd: int
    n_head: int
    vocab_size: int
    seq_len: int
    sequences: int
    micro_batches: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.seq_len

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs, counted alike for all: blocks of 12 n_embd^2 weights, and the head."""
        weights = 12 * self.n_layer * self.n_embd**2 + self.vocab_size * self.n_embd
        return flops_per_token(weights, self.n_layer, self.n_embd, self.seq_len)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", 2, 64, 2, 512, 64, 4),  # for tests of the benchmark
        Shape("s4k", 6, 384, 6, 4096, 256, 16),  # for CPUs: blocks dominate
        Shape("s50k", 6, 384, 6, 50304, 256, 16),  # for CPUs: head and loss dominate
        Shape("gpt2", 12, 768, 12, 50304, 1024, 16, 4),
        Shape("d16", 16, 1024, 8, 65536, 2048, 8, 4),
        Shape("d24", 24, 1536, 12, 65536, 2048, 8, 4),
        Shape("xlarge", 24, 2048, 16, 50304, 2048, 8, 4),
    )
}
