"""Recognize errors that mean that memory did not suffice."""

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory did not suffice. torch has an error class for this on GPUs only."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return "allocate memory" in text or "not enough memory" in text
