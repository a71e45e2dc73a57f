"""torchrun without its traceback: the processes have said why they ended, and reported their exit codes.

python -m train.torchrun [OPTIONS of torchrun] -m MODULE
"""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def run() -> int:
    """Return 0, or 1 if a process failed or torchrun was told to stop."""
    try:
        main()
    except SignalException:
        return 1
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # it could say nothing
            sys.stderr.write(f"rank {rank} (pid {failure.pid}) ended by {failure.signal_name()}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run())
