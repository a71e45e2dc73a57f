"""A run as a Slurm job: its script, and the commands that look after it.

The run's folder is on a disk that all nodes share. It gets slurm.sh, the script; slurm.job, the id of
the job; slurm.env, the secrets, which only its owner can read; and slurm.stop, once `make stop` has asked
the job to end.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from k8s.cluster.job_spec import pod_cpus, pod_memory_gb, run_environment
from k8s.cluster.kubectl import BAD_ENVIRONMENT, BAD_SETTING, Refused
from k8s.slurm_batch import STOP_REQUEST
from record.durable import write_whole
from record.run_paths import RunPaths, list_checkpoints
from record.wait import wait
from settings import ROOT
from settings.config import SETTINGS, Config
from settings.resolve import show_path
from settings.terminal import say

POLL_S = 1.0
LEAVE_S = 60.0  # beyond the grace period, for Slurm to end the job

SCRIPT = """\
#!/usr/bin/env bash
# Written by make with ENGINE=slurm. Slurm runs it on the first node of the job.
{options}

{exports}

cd {root}
exec {python} -m k8s.slurm_batch {words}
"""


def render(config: Config, paths: RunPaths) -> str:
    """Return the script of the job. It holds no secret."""
    folders = {
        "RUNS_DIR": str(paths.folder.parent),
        "DATA_DIR": str((ROOT / config.data_dir).absolute()),
    }
    environment = run_environment(config, {}, folders)
    environment["ENV_FILE"] = str(secrets_file(paths))
    # k8s/slurm_node.py asks Slurm, and the launcher counts cores.
    for name in ("NODES", "MASTER_ADDR", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    options = {
        "job-name": config.run_name,
        "nodes": config.nodes,
        "ntasks-per-node": 1,
        "gres": f"gpu:{config.gpus_per_node}",
        "cpus-per-task": pod_cpus(config),
        "mem": f"{pod_memory_gb(config)}G",
        "open-mode": "append",
        "output": shlex.quote(f"{paths.logs}/slurm_%j.log"),
        "signal": f"B:TERM@{config.grace_period_s}",
    }
    if config.device == "cpu":
        del options["gres"]
    lines = [f"--{name}={value}" for name, value in options.items()]
    words = [str(paths.folder), str(config.grace_period_s), str(config.max_restarts)]
    if config.model:
        words.append("finetune")
    return SCRIPT.format(
        options="\n".join(
            f"#SBATCH {line}" for line in [*lines, "--requeue", *config.sbatch_args.split()]
        ),
        exports="\n".join(
            f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())
        ),
        root=shlex.quote(str(ROOT)),
        python=shlex.quote(sys.executable),
        words=shlex.join(words),
    )


def send(config: Config, target: str) -> int:
    """Write the script into the run's folder and submit it; with DRY_RUN=1, print it. Raises Refused."""
    paths = RunPaths.of(config.runs_dir, config.run_name, ROOT)
    script = render(config, paths)
    if config.dry_run:
        sys.stdout.write(script)
        return 0
    run = f"RUN_NAME={config.run_name}"
    job = read_job(paths)
    if job and (state := describe_queued(job)):
        raise Refused(
            BAD_SETTING,
            f"{run}: Slurm job {job} works on this run ({state}). Use make stop {run} first, or "
            "choose another RUN_NAME.",
        )
    path = paths.folder / "slurm.sh"
    try:
        paths.logs.mkdir(parents=True, exist_ok=True)
        write_whole(path, script.encode())
        write_secrets(config, secrets_file(paths))
        stop_request(paths).unlink(missing_ok=True)
    except OSError as error:
        raise Refused(
            BAD_ENVIRONMENT, f"{path}: cannot be written ({error.strerror}). Set RUNS_DIR."
        ) from None
    done = call("sbatch", "--parsable", str(path), env=environment_of_sbatch())
    if done.returncode:
        raise Refused(BAD_ENVIRONMENT, f"sbatch refuses {show_path(path)}: {done.stderr.strip()}")
    job = done.stdout.split(";")[0].strip()  # and the name of the cluster
    write_whole(job_file(paths), job.encode())
    say(
        f"Slurm job {job} is submitted: {show_path(path)}\n"
        f"next: make status {run}, make logs {run}, make stop {run} (saves and stops; "
        f"make {target} then goes on from the last checkpoint)"
    )
    return 0


def write_secrets(config: Config, path: Path) -> None:
    """Write the settings that neither the script nor Slurm may show. Raises OSError."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        for name, declared in SETTINGS.items():
            if declared.secret and (secret := getattr(config, name.lower())):
                file.write(f"{name}={secret}\n")


def environment_of_sbatch() -> dict[str, str]:
    """Return this environment without settings, which the job has from files, and make's variables."""
    environment = {}
    for name, value in os.environ.items():
        if name not in SETTINGS and not name.startswith("MAKE") and name != "MFLAGS":
            environment[name] = value
    return environment


# ---- A run that was submitted


def job_file(paths: RunPaths) -> Path:
    return paths.folder / "slurm.job"


def secrets_file(paths: RunPaths) -> Path:
    return paths.folder / "slurm.env"


def stop_request(paths: RunPaths) -> Path:
    return paths.folder / STOP_REQUEST


def read_job(paths: RunPaths) -> str:
    """Return the id of the run's job; "" if Slurm never had it."""
    try:
        return job_file(paths).read_text()
    except OSError:
        return ""


def call(*command: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a command of Slurm. Raises Refused where there is none."""
    try:
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise Refused(
            BAD_ENVIRONMENT,
            f"{command[0]} is not installed here. Run this on a login node of the Slurm cluster; "
            "DRY_RUN=1 prints the script anywhere.",
        ) from None


def describe_queued(job: str) -> str:
    """Return the state of a job and its nodes, or why it waits; "" once it has left the queue."""
    return call("squeue", "--noheader", f"--jobs={job}", "--format=%T %R").stdout.strip()


def show_state(job: str) -> None:
    """Print one line on a job. A copy of a run's folder may be where there is no Slurm."""
    if not shutil.which("squeue"):
        say(f"Slurm job {job}: its state is not known here, where squeue is not installed")
        return
    state = describe_queued(job)
    if not state:
        ended = call("sacct", "--noheader", "-X", f"--jobs={job}", "--format=State,ExitCode")
        state = " ".join(ended.stdout.split()) or "not in the queue, and Slurm keeps no accounts"
    say(f"Slurm job {job}: {state}")


def stop(job: str, paths: RunPaths, grace_period_s: int) -> int:
    """Save, end the job and wait for that. A job that still waits for nodes is canceled. Raises Refused."""
    write_whole(stop_request(paths), b"")
    say(f"stopping Slurm job {job}: its nodes save and end, within {grace_period_s} s")
    call("scancel", "--state=PENDING", job)
    call("scancel", "--signal=TERM", job)
    if not wait(lambda: not describe_queued(job), grace_period_s + LEAVE_S, POLL_S):
        raise Refused(1, f"Slurm job {job} has not ended. scancel {job} ends it without saving.")
    step = max(list_checkpoints(paths.checkpoints), default=0)
    say(f"Slurm job {job} has ended; last checkpoint: step {step}")
    return 0
