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
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("NCCL error: Failed to CUDA calloc async 608 bytes"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("out of resource: shared memory, Required: 262144"), False),
        (RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED"), False),
        (RuntimeError("shapes differ"), False),
        (OSError("not enough memory"), False),
    ],
)
def test_only_what_says_so_is_too_little_memory(error, is_memory):
    assert is_out_of_memory(error) == is_memory
