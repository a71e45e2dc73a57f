"""Python runs this first, in each process that has this folder on PYTHONPATH: a trainer then gets its faults."""

import sys

from tests.site import sitecustomize as constants  # noqa: F401 (it replaces them, being another sitecustomize)

if sys.orig_argv[-2:-1] == ["-m"] and sys.orig_argv[-1] in (
    "train.main",
    "train.data.streaming.producer",
    "finetune.main",
):
    from tests.faults import (
        inject,  # and not in torchrun, the questions about settings, or a tracker
    )

    inject.install(producer=sys.orig_argv[-1] == "train.data.streaming.producer")
