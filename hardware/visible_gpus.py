"""Which GPUs CUDA_VISIBLE_DEVICES leaves to this process. Standard library only."""

import os


def visible_gpus() -> list[str] | None:
    """Return the indices or UUIDs in CUDA_VISIBLE_DEVICES; None where it is not set, and all GPUs are visible."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    return [name.strip() for name in text.split(",") if name.strip()]
