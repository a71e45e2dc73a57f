"""A command about what is trained: its settings, its processes and its exit code.

Exit codes: 0 done; 64 a setting is invalid; 69 other processes are missing; 78 weights, data or
environment are bad; 130 Ctrl-C.
"""

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import TextIO

from settings import ExpectedError, explain_error
from settings.config import Config
from train import console
from train.distributed.world import World, join, leave, report_exit
from train.generate.load_run import settings_of_command

log = logging.getLogger(__name__)

STOPS = (signal.SIGINT, signal.SIGTERM)


def run_command(work: Callable[[Config, World], int], output: TextIO) -> int:
    """Read the settings, join the other processes and do the work. Returns the exit code.

    Args:
        work: what is done; it returns the exit code.
        output: where the log goes.
    """
    console.start_logging(output)
    # DCP, in one process
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    for number in STOPS:
        signal.signal(number, stop)
    try:
        config, remarks = settings_of_command()
        world = join(config, trains=False)
        if not world.is_first:
            logging.getLogger().setLevel(logging.WARNING)
        for remark in remarks:
            log.info("%s", remark)
        code = work(config, world)
    except ExpectedError as error:
        log.error("%s", explain_error(error))
        code = error.exit_code
    except BrokenPipeError:  # the reader has enough; else Python would complain at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        log.info("Interrupted. The same command starts again.")
        sys.stdout.flush()
        os._exit(130)  # other processes may be gone, and what waits for them would wait for long
    report_exit(code)
    leave()
    return code


def stop(number: int, frame: FrameType | None) -> None:
    """Interrupt at the first signal. One Ctrl-C comes several times, from the terminal and the launcher."""
    for other in STOPS:
        signal.signal(other, lambda *_: None)
    raise KeyboardInterrupt
