"""A real Slurm of four nodes on this machine. A node is a slurmd; its name is a loopback address, so that others reach it."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from hardware.ports import free_ports
from tests.running import wait_until

NODES = [f"127.0.0.{number}" for number in (2, 3, 4, 5)]
LACKS = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if not shutil.which(name)]
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
MpiDefault=none
JobRequeue=1
SlurmdTimeout=10
KillWait=5
MinJobAge=2
{nodes}
PartitionName=main Nodes=127.0.0.[2-5] Default=YES MaxTime=1:00:00 State=UP
"""


class Slurm:
    """Started in a folder, until `close`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.conf = folder / "slurm.conf"
        ports = free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={ports + 1 + index} "
            "CPUs=2 RealMemory=8000"
            for index, name in enumerate(NODES)
        ]
        self.conf.write_text(
            CONF.format(folder=folder, host=host, port=ports, nodes="\n".join(nodes))
        )
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self.start(
            *("munged", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"),
            *(f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log"),
            f"--seed-file={folder}/munge.seed",
        )
        self.start("slurmctld", "-f", str(self.conf))
        for name in NODES:
            self.start_node(name)
        wait_until(lambda: self.ask("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * 4, 60)

    def start(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def start_node(self, name: str) -> None:
        self.start("slurmd", "-f", str(self.conf), "-N", name)

    def ask(self, *command: str) -> str:
        env = os.environ | {"SLURM_CONF": str(self.conf)}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout

    def nodes_of(self, job: str) -> list[str]:
        nodes = self.ask("squeue", "-h", "-j", job, "-o", "%N").strip()
        return self.ask("scontrol", "show", "hostnames", nodes).split()

    def restarts(self, job: str) -> int:
        words = self.ask("scontrol", "show", "job", job).split()
        return int(dict(word.partition("=")[::2] for word in words).get("Restarts", 0))

    def tasks_on(self, name: str, job: str) -> list[int]:
        """The processes of a job on a node."""
        wanted = {
            f"SLURMD_NODENAME={name}",
            f"SLURM_JOB_ID={job}",
            f"SLURM_CONF={self.conf}",
        }
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if wanted <= set((process / "environ").read_text(errors="replace").split("\0")):
                    found.append(int(process.name))
            except OSError:
                continue  # it has ended
        return found

    def kill_tasks(self, name: str, job: str) -> None:
        for pid in self.tasks_on(name, job):
            kill(pid)

    def lose(self, name: str, job: str) -> None:
        """Kill a node: slurmd, what runs the job's steps there, and the processes of the job."""
        tasks = self.tasks_on(name, job)
        parents = {parent_of(pid) for pid in tasks} - {*tasks, 1}
        kill(int((self.folder / f"slurmd.{name}.pid").read_text()))
        for pid in parents:
            if "slurmstepd" in Path(f"/proc/{pid}/cmdline").read_text():
                kill(pid)
        for pid in tasks:
            kill(pid)

    def close(self) -> None:
        self.ask("scancel", "--user=root")
        deadline = time.monotonic() + 20
        while self.ask("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.2)
        for path in self.folder.glob("*.pid"):
            kill(int(path.read_text()), signal.SIGTERM)


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 1


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
