"""`make export`: look for the run before torch is loaded, which takes seconds, then export it (convert.py)."""

import sys

from record.default_run import require_run
from record.locks import RunFolderError
from settings import SettingsError, explain_error
from settings.checks import CHECKS
from settings.resolve import resolve
from settings.terminal import complain


def main() -> int:
    """Return the exit code: 64 a setting is invalid, 78 there is no such run, or that of convert.py."""
    try:
        resolved = resolve(without=CHECKS).check()
        if "RUN_NAME" in resolved.explicit:
            require_run(resolved.config)
    except (SettingsError, RunFolderError) as error:
        complain(explain_error(error))
        return error.exit_code
    from export import convert

    return convert.main()


if __name__ == "__main__":
    sys.exit(main())
