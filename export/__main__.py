"""`make export`: a run as a folder in Hugging Face format, runs/RUN_NAME/export.

    pretrained run  -> export/convert.py
    fine-tuned run  -> finetune/merge.py

The run is looked for before torch is loaded, which takes seconds. Exit codes: those of export_command.py.
"""

import os
import sys

from record.default_run import choose_run, require_run
from record.run_paths import RunPaths
from settings import ROOT, ExpectedError, explain_error
from settings.checks import CHECKS
from settings.resolve import resolve
from settings.resume import read_run_config
from settings.terminal import complain


def main() -> int:
    """Return the exit code of a run that is not there; else become the process that exports it."""
    try:
        config = resolve(defaults=choose_run(), without=CHECKS).check().config
        require_run(config)
        paths = RunPaths.of(config.runs_dir, config.run_name, ROOT)
        settings = read_run_config(paths.config).get("settings", {})
    except ExpectedError as error:
        complain(explain_error(error))
        return error.exit_code
    module = "finetune.merge" if settings.get("MODEL") else "export.convert"
    os.execv(sys.executable, [sys.executable, "-m", module])


if __name__ == "__main__":
    sys.exit(main())
