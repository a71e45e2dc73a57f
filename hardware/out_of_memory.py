"""Recognize errors that mean that memory did not suffice."""

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory did not suffice; torch has an error class for this on GPUs only."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "allocate memory" in text or "not enough memory" in text
    )
