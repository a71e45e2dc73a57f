"""What the script of a Slurm job runs on the job's first node: the run's nodes, and the job again where that helps.

    python -m k8s.slurm_batch RUN_FOLDER GRACE_PERIOD_S MAX_RESTARTS [finetune]

Slurm signals this process alone before the time limit. It passes the signal on to the nodes, which save and end
with code 75.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from record.exit_codes import DONE, ROWS, STOPPED
from record.run_paths import RunPaths, list_checkpoints
from settings.terminal import say

STOP_REQUEST = "slurm.stop"  # in the run's folder, once `make stop` has asked the job to end
FINAL = frozenset(row.code for row in ROWS if row.ends_job)


def starts_again(code: int, has_saved: bool, restarts: int, most: int, is_stopped: bool) -> bool:
    """Decide whether a job whose nodes have ended starts again.

    Args:
        code: of the nodes.
        has_saved: this start of the job has brought a checkpoint.
        restarts: how often Slurm has started the job again.
        most: how often it may without a new checkpoint.
        is_stopped: `make stop` has asked the job to end.
    """
    if code in FINAL or is_stopped:
        return False
    return code == STOPPED or has_saved or restarts < most


def main(words: list[str]) -> int:
    """Return the exit code of the job."""
    folder, grace_period_s, max_restarts, *purpose = words
    paths = RunPaths(Path(folder))
    job = os.environ["SLURM_JOB_ID"]
    signal.signal(
        signal.SIGTERM,
        lambda *_: subprocess.run(["scancel", "--signal=TERM", job], check=False),
    )
    before = list_checkpoints(paths.checkpoints)
    cpus = os.environ["SLURM_CPUS_PER_TASK"]  # srun does not take it from the job
    node = [sys.executable, "-m", "k8s.slurm_node", *purpose]
    srun = ["srun", "--label", f"--cpus-per-task={cpus}", f"--wait={grace_period_s}", *node]
    code = subprocess.run(srun, check=False).returncode
    if code < 0:  # a signal ended srun
        code = 128 - code
    say(f"job {job}: the nodes ended with code {code}")
    if not starts_again(
        code,
        has_saved=list_checkpoints(paths.checkpoints)[-1:] != before[-1:],
        restarts=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        most=int(max_restarts),
        is_stopped=(paths.folder / STOP_REQUEST).exists(),
    ):
        return code
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Slurm ends this process now
    subprocess.run(["scontrol", "requeue", job], check=True)
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
