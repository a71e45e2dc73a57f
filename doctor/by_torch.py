"""What torch itself sees and would use, as JSON on standard output: a process of its own, since loading takes seconds.

    python -m doctor.by_torch      the settings as every other process reads them; kernels.py starts it

The one module of plan/ and doctor/ that loads torch; no other imports it.
"""

import json
import sys
from typing import Any

import torch

from hardware import model_size
from settings import SettingsError
from settings.config import Config
from settings.finding import complain
from train.model import attention, compilation


def facts(c: Config) -> dict[str, Any]:
    """The keys of kernels.ByTorch."""
    gpus, problem = cards(c)
    device = torch.device("cuda" if gpus else "cpu")
    kernel, refused = "", ""
    try:
        kernel = attention.choose(c, device).name
    except SettingsError as error:
        refused = error.problems[0]
    work = c.last_step * c.batch_tokens * model_size.flops_of(c)
    worth = device.type != "cpu" or work >= compilation.FLOPS_WORTH_COMPILING_ON_CPU
    return {
        "version": torch.__version__,
        "gpus": gpus,
        "problem": problem,
        "kernel": kernel,
        "refused": refused,
        "worth_compiling": worth,
    }


def cards(c: Config) -> tuple[list[str], str]:
    """(names of the GPUs that torch computed something on, what it said where it could not)."""
    if c.device == "cpu" or not torch.backends.cuda.is_built():
        return [], ""
    found: list[str] = []
    try:
        for i in range(torch.cuda.device_count()):
            if float(torch.arange(4.0, device=f"cuda:{i}").square().sum()) != 14.0:
                return found, f"card {i} computes wrong: 0 + 1 + 4 + 9 is not 14"
            found.append(torch.cuda.get_device_name(i))
    except (RuntimeError, AssertionError) as error:  # AssertionError: of a build without CUDA
        return found, " ".join(str(error).split())[:300]
    return found, ""


def main() -> int:
    try:
        c = Config.load()
    except SettingsError as error:
        complain(error)
        return 64
    sys.stdout.write(json.dumps(facts(c)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
