"""k8s/slurm.py without a Slurm: the script, the place of a node, the refusals; and the page. Commands of Slurm are
stand-ins that note how they were called."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from k8s import slurm_node
from settings import ROOT
from settings.config import SETTINGS

SECRETS = {
    "RUN_SECRET": "run-secret-that-nobody-may-read",
    "WANDB_API_KEY": 4 * "0123456789",
    "HF_TOKEN": "hf_nobody_may_read",
}
SETTINGS_OF_RUN = {
    "ENGINE": "slurm",
    "PRESET": "tiny",
    "RUN_NAME": "tiny",
    "NODES": "3",
    "GPUS_PER_NODE": "4",
    "POD_MEMORY_GB": "200",
    "GRACE_PERIOD_S": "120",
    "BATCH_TOKENS": "49152",
    "MICRO_BATCH_SIZE": "32",
    "WANDB_MODE": "offline",
    "SBATCH_ARGS": "--partition=gpu --account=lab --time=24:00:00 --exclusive",
}
HEAD = """\
#!/usr/bin/env bash
# Written by make with ENGINE=slurm. Slurm runs it on the first node of the job.
#SBATCH --job-name=tiny
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=16
#SBATCH --mem=200G
#SBATCH --open-mode=append
#SBATCH --output=RUN/logs/slurm_%j.log
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --time=24:00:00
#SBATCH --exclusive

"""
TAIL = """\

cd ROOT
exec PYTHON -m k8s.slurm_batch RUN 120 10
"""


class User:
    """Types commands, with stand-ins for Slurm's in the path."""

    def __init__(self, folder: Path):
        self.runs = folder / "runs"
        self.run = self.runs / "tiny"
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.called = folder / "called"
        self.called.touch()
        (folder / "empty.env").touch()
        self.env = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(folder),
            "ENV_FILE": str(folder / "empty.env"),
            "RUNS_DIR": str(self.runs),
            **SETTINGS_OF_RUN,
        }

    def has(self, command: str, does: str) -> None:
        """Install a command of Slurm."""
        path = self.bin / command
        path.write_text(f'#!/bin/bash\necho {command} "$@" >> {self.called}\n{does}\n')
        path.chmod(0o755)

    def types(self, module: str, *words: str, **settings: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=ROOT,
            env=self.env | settings,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def sends(self, **settings: str) -> tuple[int, str, str]:
        return self.types("k8s.launch", **settings)


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


# ---- The script


def test_the_script_of_a_job(user: User) -> None:
    code, script, _ = user.sends(DRY_RUN="1", **SECRETS)
    assert code == 0
    names = {"RUN": user.run, "ROOT": ROOT, "PYTHON": sys.executable}
    head, tail = HEAD, TAIL
    for name, path in names.items():
        head = re.sub(rf"\b{name}\b", str(path), head)
        tail = re.sub(rf"\b{name}\b", str(path), tail)
    assert script.startswith(head)
    assert script.endswith(tail)
    exports = dict(
        line.removeprefix("export ").split("=", 1)
        for line in script[len(head) : -len(tail)].splitlines()
    )
    assert exports["BATCH_TOKENS"] == "49152" and exports["NPROC"] == "4"
    assert exports["RUNS_DIR"] == str(user.runs) and exports["ENV_FILE"] == f"{user.run}/slurm.env"
    assert exports.keys() <= SETTINGS.keys()
    assert not exports.keys() & {"ENGINE", "NODES", "NODE_RANK", "MASTER_ADDR", *SECRETS}
    assert not [secret for secret in SECRETS.values() if secret in script]
    assert not user.runs.exists()
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_a_run_without_gpus_asks_for_none(user: User) -> None:
    _, script, _ = user.sends(DRY_RUN="1", DEVICE="cpu", GPUS_PER_NODE="1")
    assert "--gres" not in script and "#SBATCH --cpus-per-task=2\n" in script


# What the nodes end with, how often the job was started again, whether make stop has asked, whether a
# checkpoint came; and how the script ends: "requeue", or a code.
ENDS = [
    (0, 0, False, True, "0"),
    (64, 0, False, False, "64"),
    (70, 0, False, True, "70"),
    (78, 0, False, True, "78"),
    (75, 40, False, False, "requeue"),
    (75, 0, True, True, "75"),
    (137, 9, False, False, "requeue"),
    (137, 10, False, True, "requeue"),
    (137, 10, False, False, "137"),
    (69, 0, False, False, "requeue"),
]


@pytest.mark.parametrize(("code", "restarts", "stopped", "saves", "end"), ENDS)
def test_a_job_is_requeued_where_starting_again_can_help(
    user: User, code: int, restarts: int, stopped: bool, saves: bool, end: str
) -> None:
    _, script, _ = user.sends(DRY_RUN="1")
    checkpoints = user.run / "checkpoints"
    checkpoints.mkdir(parents=True)
    if stopped:
        (user.run / "slurm.stop").touch()
    save = f"mkdir {checkpoints}/step_0000010; " if saves else ""
    user.has("srun", f"{save}exit {code}")
    user.has("scontrol", "")
    done = subprocess.run(
        ["bash", "-c", script],
        env=user.env
        | {
            "SLURM_JOB_ID": "12",
            "SLURM_CPUS_PER_TASK": "16",
            "SLURM_RESTART_COUNT": str(restarts),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    srun = f"srun --label --cpus-per-task=16 --wait=120 {sys.executable} -m k8s.slurm_node\n"
    assert user.called.read_text().startswith(srun)
    is_requeued = "scontrol requeue 12" in user.called.read_text()
    assert (end if is_requeued else str(done.returncode)) == end
    assert is_requeued == (end == "requeue"), done.stderr


# ---- The place of a node


@pytest.mark.parametrize(
    ("variables", "settings"),
    [
        (("4", "0", "12"), ("4", "0", "gpu-1:20024")),
        (("4", "3", "12"), ("4", "3", "gpu-1:20024")),
        (("2", "1", "5001"), ("2", "1", "gpu-1:20002")),
    ],
)
def test_the_place_of_a_node_follows_from_slurm(
    variables: tuple[str, ...], settings: tuple[str, ...]
) -> None:
    names = ("SLURM_NNODES", "SLURM_NODEID", "SLURM_JOB_ID")
    place = slurm_node.read_place(dict(zip(names, variables, strict=True)), "gpu-1")
    assert place == dict(zip(("NODES", "NODE_RANK", "MASTER_ADDR"), settings, strict=True))
    assert SETTINGS["MASTER_ADDR"].parse(place["MASTER_ADDR"])


# ---- Submit, look after, refuse


def test_a_run_is_submitted_and_its_secrets_are_only_in_a_file_of_the_user(user: User) -> None:
    user.has("sbatch", f"env > {user.bin}/env; echo '12;cluster'")
    user.has("squeue", "echo 'PENDING (Resources)'")
    code, out, err = user.sends(MAKEFLAGS="-- NODES=3", MAKE_TARGET="train-8xa100", **SECRETS)
    assert code == 0, err
    assert out.startswith("Slurm job 12 is submitted: ")
    assert "next: make status RUN_NAME=tiny" in out
    assert user.called.read_text() == f"sbatch --parsable {user.run}/slurm.sh\n"
    given = (user.bin / "env").read_text()
    assert not [secret for secret in SECRETS.values() if secret in given]
    assert not re.search(r"^(MAKE|NODES|ENGINE|RUNS_DIR)", given, re.MULTILINE)
    secrets = user.run / "slurm.env"
    assert secrets.stat().st_mode & 0o777 == 0o600
    assert sorted(secrets.read_text().split()) == sorted(f"{n}={v}" for n, v in SECRETS.items())

    code, out, _ = user.types("k8s.jobs", "status")
    assert (code, out) == (0, "Slurm job 12: PENDING (Resources)\n")
    code, _, err = user.sends()
    assert code == 64 and "Slurm job 12 works on this run (PENDING (Resources))" in err
    code, _, err = user.types("k8s.jobs", "restart")
    assert code == 64 and "run tiny is Slurm's job 12" in err


def test_a_job_that_waits_for_nodes_is_canceled_by_make_stop(user: User) -> None:
    user.has("sbatch", "echo 12")
    user.has("squeue", f"[ -e {user.bin}/gone ] || echo 'PENDING (Priority)'")
    user.has("scancel", f"touch {user.bin}/gone")
    assert user.sends()[0] == 0
    code, out, _ = user.types("k8s.jobs", "stop")
    assert code == 0 and "Slurm job 12 has ended" in out
    assert "scancel --state=PENDING 12\nscancel --signal=TERM 12\n" in user.called.read_text()
    assert (user.run / "slurm.stop").exists()
    user.has("sacct", "echo '  CANCELLED      0:0 '")
    assert user.types("k8s.jobs", "status")[1] == "Slurm job 12: CANCELLED 0:0\n"


def test_a_copy_of_a_run_has_a_status_where_there_is_no_slurm(user: User) -> None:
    user.run.mkdir(parents=True)
    (user.run / "slurm.job").write_text("12")
    code, out, _ = user.types("k8s.jobs", "status", PATH="/none")
    assert code == 0 and out.startswith("Slurm job 12: its state is not known here")


@pytest.mark.parametrize(
    ("settings", "code", "text"),
    [
        ({"ENGINE": "slrm"}, 64, "ENGINE=slrm (environment): Must be one of kubernetes, slurm."),
        ({"SBATCH_ARGS": "gpu"}, 64, "Must be long options with blanks between them"),
        ({"SBATCH_ARGS": "--qos=a --nodes=9"}, 64, "but not --job-name, --nodes"),
        ({"SBATCH_ARGS": "--comment=$(id)"}, 64, "Must be long options"),
        ({"SYNC": "diloco", "OPTIMIZER": "adamw"}, 64, "which only ENGINE=kubernetes starts; set SYNC=ddp"),
        ({"MAKE_TARGET": "train-8xa100", "MAKE_SETTINGS": "VOLUME", "VOLUME": "v"}, 64,
         "VOLUME (command line): Has no effect without ENGINE=kubernetes."),
        ({"PATH": "/none"}, 78, "sbatch is not installed here. Run this on a login node"),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_is_refused_with_what_to_do(
    user: User, settings: dict[str, str], code: int, text: str
) -> None:
    ended, _, err = user.sends(**settings)
    assert ended == code and text in err, err


def test_what_sbatch_refuses_is_repeated(user: User) -> None:
    user.has("sbatch", "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    code, _, err = user.sends()
    assert code == 78 and "slurm.sh: sbatch: error: invalid partition specified: gpu" in err


# ---- The page


def test_the_examples_of_the_page_start_the_nodes_that_they_say() -> None:
    page = (ROOT / "docs" / "slurm.md").read_text()
    blocks = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    sky, job_set = blocks
    assert set(sky) == {
        *("name", "num_nodes", "resources", "workdir", "setup", "envs", "secrets", "run")
    }
    assert job_set["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and job_set["kind"] == "JobSet"
    (group,) = job_set["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    assert job["completionMode"] == "Indexed"
    nodes = job["completions"]
    assert nodes == job["parallelism"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry for entry in container["env"]}
    assert environment["NODES"]["value"] == str(nodes)
    assert environment["MASTER_ADDR"]["value"] == (
        f"{job_set['metadata']['name']}-{group['name']}-0-0.{job_set['metadata']['name']}"
    )
    assert "job-completion-index" in str(environment["NODE_RANK"]["valueFrom"])
    assert container["command"][-2:] == ["-m", "scripts.train"]
    for name in {**environment, **sky["envs"], **sky["secrets"]}:
        assert name in SETTINGS
    for name, variable in (("NODES", "SKYPILOT_NUM_NODES"), ("NODE_RANK", "SKYPILOT_NODE_RANK")):
        assert f"{name}=${variable}" in sky["run"]
    assert "make train-node" in sky["run"] and "make setup" in sky["setup"]
