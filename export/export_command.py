"""What the export commands share: signals, exit codes and the last lines.

Exit codes: 0; 64 a setting is invalid; 78 checkpoint, model, tokenizer, disk or Hub are bad; 130 Ctrl-C
or SIGTERM. Whatever ends an export, the one that was there before stays until the new one is complete.
"""

import logging
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from record import number_formats
from record.exit_codes import BAD_DATA, DONE
from record.run_paths import RunPaths
from settings import ROOT, ExpectedError, explain_error
from settings.config import Config
from settings.resolve import show_path
from settings.terminal import complain, say
from train.generate.command import STOPS, stop
from train.generate.load_run import settings_of_command

STOPPED = 130


def run_export(work: Callable[[Config, RunPaths], None]) -> int:
    """Read the settings and export RUN_NAME. Returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    # DCP, in one process
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    def export() -> None:
        config, _ = settings_of_command()
        work(config, RunPaths.of(config.runs_dir, config.run_name, ROOT))

    return run_command(
        export, "Interrupted. Nothing was exported, and an earlier export is unchanged."
    )


def run_command(work: Callable[[], None], interrupted: str) -> int:
    """Do the work and return the exit code.

    Args:
        interrupted: what Ctrl-C or SIGTERM prints.
    """
    for number in STOPS:
        signal.signal(number, stop)
    try:
        work()
    except ExpectedError as error:
        complain(explain_error(error))
        return error.exit_code
    except OSError as error:
        complain(
            f"{error.filename or 'The export'}: Cannot be read or written ({error.strerror or error}). "
            "Free disk space, or fix the permissions."
        )
        return BAD_DATA
    except KeyboardInterrupt:
        complain(interrupted)
        return STOPPED
    return DONE


def report(target: Path, what: str) -> None:
    """Print what an export holds, and how it is used."""
    size = sum(path.stat().st_size for path in target.iterdir())
    folder = show_path(target)
    say(
        f"{folder}: {what}, {number_formats.size(size)}. Every file of weights was read back and has the "
        f"hash of what was written.\n"
        f"  check:   (cd {folder} && sha256sum -c SHA256SUMS)\n"
        f"  Python:  transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})\n"
        f"  serve:   vllm serve {folder}"
    )
