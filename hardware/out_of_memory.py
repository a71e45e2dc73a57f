"""Recognize errors that mean that memory did not suffice."""

import torch

# CPUs, GPUs and their drivers, NCCL, C++, and the libraries of NVIDIA (CUBLAS_STATUS_ALLOC_FAILED)
WORDS = (
    "allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "CUDA calloc",
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory did not suffice. torch has an error class for its own allocator on GPUs only."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return any(words in text for words in WORDS)
