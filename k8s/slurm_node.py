"""Start one node of a run in a step of a Slurm job.

    srun ... python -m k8s.slurm_node [finetune]      in the script of k8s/slurm.py, once on each node

Slurm tells a node its place in the job. The run takes it as three settings.
"""

import os
import subprocess
import sys
from collections.abc import Mapping

FROM_SLURM = {"NODES": "SLURM_NNODES", "NODE_RANK": "SLURM_NODEID"}
FIRST_PORT = 20000  # below those that systems choose by themselves
PORT_PAIRS = 5000  # MASTER_ADDR's and the next one: jobs that share a node have their own


def read_place(environ: Mapping[str, str], first_host: str) -> dict[str, str]:
    """Return NODES, NODE_RANK and MASTER_ADDR of this node."""
    settings = {name: environ[variable] for name, variable in FROM_SLURM.items()}
    port = FIRST_PORT + 2 * (int(environ["SLURM_JOB_ID"]) % PORT_PAIRS)
    return settings | {"MASTER_ADDR": f"{first_host}:{port}"}


def main(words: list[str]) -> None:
    """Become the process that runs the node."""
    environment = dict(os.environ)
    if environment["SLURM_NNODES"] != "1":
        show_hosts = ["scontrol", "show", "hostnames", environment["SLURM_JOB_NODELIST"]]
        hosts = subprocess.run(show_hosts, stdout=subprocess.PIPE, text=True, check=True).stdout
        environment |= read_place(environment, hosts.split()[0])
        words = [*words, "node"]
    command = [sys.executable, "-m", "scripts.train", *words]
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    main(sys.argv[1:])
