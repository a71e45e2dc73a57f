"""A command about what is trained: its settings, its processes and its exit code.

Exit codes: 0 done; 64 a setting is invalid; 69 other processes are missing; 78 weights, data or
environment are bad; 130 Ctrl-C.
"""

import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, TextIO

from settings import ExpectedError, SettingsError, explain_error
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
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # whatever the locale has
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


def refuse(problem: str) -> NoReturn:
    raise SettingsError([problem])


def read_prompt(config: Config) -> str:
    """Return PROMPT, or else standard input unless that is a terminal; "" if there is none.

    Raises SettingsError.
    """
    if not config.sample_tokens:
        refuse("SAMPLE_TOKENS=0: Leaves no room for text. Set for example SAMPLE_TOKENS=160.")
    if config.prompt or sys.stdin.isatty():
        return config.prompt
    log.info("the prompt is read from standard input")  # which the caller may have left open
    # A line end at the end is the shell's.
    return decode(sys.stdin.buffer.read()).removesuffix("\n").removesuffix("\r")


def decode(content: bytes) -> str:
    """Decode what was typed. Raises SettingsError."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        refuse(f"Standard input: its byte {error.start} is not UTF-8. Give text, or PROMPT.")


def stop(number: int, frame: FrameType | None) -> None:
    """Interrupt at the first signal. One Ctrl-C comes several times, from the terminal and the launcher."""
    for other in STOPS:
        signal.signal(other, lambda *_: None)
    raise KeyboardInterrupt
