"""Which GPUs CUDA_VISIBLE_DEVICES leaves to this process. Standard library only."""

import os


def visible_gpus() -> list[str] | None:
    """Return the indices and UUIDs in CUDA_VISIBLE_DEVICES; None if it is unset: all are visible."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    names = []
    for entry in text.split(","):
        if name := entry.strip():
            names.append(name)
    return names
