"""Whether an error says that memory did not suffice."""

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice; torch has a class of its own for GPUs only."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError)
        and ("allocate memory" in str(error) or "not enough memory" in str(error))
    )
