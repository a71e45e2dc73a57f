"""What counts as too little memory, on a GPU and on a CPU."""

import pytest
import torch

from hardware.out_of_memory import is_out_of_memory


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried 8 bytes"), True),
        (RuntimeError("shapes differ"), False),
        (OSError("not enough memory"), False),
    ],
)
def test_only_what_says_so_is_too_little_memory(error, is_memory):
    assert is_out_of_memory(error) == is_memory
