"""Start as many probes as processes train on this machine, tuned as the launcher tunes them.

    python -m doctor.gpu_probe.start DEVICE NPROC PORT PART SETTINGS UNTIL LIMIT

NPROC may be empty: all visible GPUs, or one process. The others are those of probe.py. It prints
what was tuned, the JSON lines of the probes, and {"ended": CODE} for each that ends.
"""

import os
import subprocess
import sys
import time

from train.children import code_of_shell, say
from train.tune import count_gpus, forget_ranks, tune

TICK_S = 0.02


def main(device: str, nproc: str, port: str, *words: str) -> None:
    environment = dict(os.environ)
    forget_ranks(environment)
    gpus = 0 if device == "cpu" else count_gpus(environment)
    processes = int(nproc or max(1, gpus))
    say(tune(environment, processes, gpus))
    environment |= {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    part, settings, until, limit = words
    command = [sys.executable, "-m", "doctor.gpu_probe.probe", part, settings]
    command += [str(processes), until, limit]
    running = []
    for rank in range(processes):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        running.append(subprocess.Popen(command, env=environment | place))
    while running:
        for process in list(running):
            code = process.poll()
            if code is not None:
                say(f'{{"ended": {code_of_shell(code)}}}')
                running.remove(process)
        time.sleep(TICK_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
