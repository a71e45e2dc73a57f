"""Runs whose processes are killed and told to stop at random, started again until they are done, and compared with
runs that were left alone: the losses must be equal, hex for hex.

    python -m tests.faults.chaos          CHAOS_MINUTES (default 10), CHAOS_SEED (default: by the clock; it is printed)

A run is started as a cluster would: scripts/launch.sh with the same settings, again whenever it ended with anything
but 0. Where the number of processes changes on the way, sums are made in another order: losses then agree to 1e-5.
Exit code 1 with the seed, and the folder left as it is, where anything is not as it must be.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from record import goodput
from record import metrics as record_reader
from tests.conftest import make_data
from tests.faults.inject import Fault, faulty, processes
from tests.running import ROOT, environment, losses, train
from train.checkpoint import manifest

LAUNCH = [str(ROOT / "scripts" / "launch.sh")]
SETTINGS = {
    "MAX_STEPS": 240,
    "TRAIN_TOKENS": 240 * 512,
    "SAVE_EVERY": 10,
    "KEEP_LAST": 3,
    "EVAL_EVERY": 100,
    "EVAL_TOKENS": 256,
    "SAMPLE_TOKENS": 0,
    "LOG_EVERY": 20,
}
SLOWLY = Fault(
    "step", "sleep", value=0.08, every=True
)  # else a run would be done before anything happens to it
PLANS = (
    (2,),
    (1,),
    (2,),
    (4,),
    (1, 2, 4),
    (2,),
)  # processes of a run; of several one at each start
CLOSE = 1e-5
PATIENCE_S = (
    600.0  # for a launcher that was told to stop, and for a run to get on after the last blow
)
BLOWS = ("a rank", "a rank", "torchrun", "all ranks", "everything", "stop", "stop")


class Wrong(Exception):
    """Something is not as it must be; the message says what."""


class Run:
    """One run that is struck until it is done."""

    def __init__(self, folder, data, plan, rng):
        folder.mkdir()
        self.folder, self.data, self.plan, self.rng = folder, data, plan, rng
        self.run, self.blows = folder / "run", Counter[str]()
        self.starts, self.process = 0, None

    def start(self):
        env = environment(
            self.folder, self.data, NPROC=self.rng.choice(self.plan), MAX_RESTARTS=20, **SETTINGS
        )
        with open(self.folder / "console.log", "a") as said:
            self.process = subprocess.Popen(
                LAUNCH,
                env=faulty(env, self.folder, SLOWLY),
                cwd=ROOT,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        self.starts += 1

    def strike(self):
        """One blow, to whatever of the run is there."""
        blow = self.rng.choice(BLOWS)
        ranks, agents = [], []
        for pid, command in processes(self.folder):
            if "torch.distributed.run" in command:
                agents.append(pid)
            elif command.endswith("-m train.main"):
                ranks.append(pid)
        if blow == "stop":
            self.process.send_signal(signal.SIGTERM)
            self.blows["SIGTERM to the launcher"] += 1
            try:
                code = self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                raise Wrong(f"told to stop, it goes on after {PATIENCE_S:.0f} s") from None
            if code not in (0, 75, 143):
                raise Wrong(f"told to stop, it ended with code {code}")
            return
        struck = {
            "a rank": self.rng.sample(ranks, min(1, len(ranks))),
            "all ranks": ranks,
            "torchrun": agents,
            "everything": [self.process.pid, *agents, *ranks],
        }[blow]
        for pid in struck:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.blows[f"SIGKILL to {blow}"] += 1

    def go_on(self, until):
        """One turn of waiting and striking; whether the run is done. until: no blow falls after that."""
        if self.process is None:
            self.start()
        pause = self.rng.uniform(2, 14)
        strikes = time.monotonic() + pause < until
        try:
            code = self.process.wait(pause if strikes else PATIENCE_S)
        except subprocess.TimeoutExpired:
            if not strikes:
                raise Wrong(f"left alone, it is not done in {PATIENCE_S:.0f} s") from None
            self.strike()
            return False
        self.process = None
        if code in (64, 70, 78):
            raise Wrong(f"it ended with code {code}, which no cluster would start again")
        return code == 0

    def verify(self, expected):
        """All that must hold of a run that is done. Returns what it went through."""
        deadline = time.monotonic() + 15
        while left := processes(self.folder):
            if time.monotonic() > deadline:
                raise Wrong(f"processes are left: {left}")
            time.sleep(0.2)
        found = losses(self.run)
        if found.keys() != expected.keys():
            raise Wrong(f"steps are missing: {sorted(expected.keys() - found.keys())}")
        for step, values in found.items():
            if len(self.plan) == 1 and [v.hex() for v in values] != [
                v.hex() for v in expected[step]
            ]:
                raise Wrong(f"step {step}: loss and norm {values}, left alone {expected[step]}")
            if abs(values[0] / expected[step][0] - 1) > CLOSE:
                raise Wrong(f"step {step}: loss {values[0]}, left alone {expected[step][0]}")
        names = sorted(path.name for path in (self.run / "checkpoints").iterdir())
        records = list(record_reader.read_records(self.run / "metrics.jsonl"))
        written = {
            r["step"] for r in records if r["event"] in ("checkpoint", "resume")
        }  # killed before it said so
        newest = sorted(written)[-SETTINGS["KEEP_LAST"] :]
        if names != [f"step_{step:07d}" for step in newest] or newest[-1] != SETTINGS["MAX_STEPS"]:
            raise Wrong(
                f"the folder of checkpoints holds {names}, and the newest that were written are {newest}"
            )
        for name in names:
            manifest.verify(self.run / "checkpoints" / name)
        state = json.loads((self.run / "STATUS.json").read_text())
        if state["phase"] != "done":
            raise Wrong(f"STATUS.json says {state['phase']}")
        made, attempts = (
            [r["step"] for r in records if r["event"] == "step"],
            records[-1]["attempt"] + 1,
        )
        return (
            f"{sum(self.blows.values())} blows ({', '.join(f'{n} {what}' for what, n in self.blows.items())}), "
            f"{self.starts} starts, {attempts} attempts that trained, {len(made) - len(set(made))} of {len(made)} "
            f"steps made again, {goodput.Timeline(records).summary()}"
        )


def references(folder, data):
    """Processes -> losses of a run that was left alone."""
    found = {}
    for nproc in sorted({n for plan in PLANS for n in plan}):
        (folder / f"alone_{nproc}").mkdir()
        train(environment(folder / f"alone_{nproc}", data, NPROC=nproc, **SETTINGS), command=LAUNCH)
        found[nproc] = losses(folder / f"alone_{nproc}" / "run")
    return found


def chaos(folder, minutes, seed):
    began = told = time.monotonic()
    data = make_data(folder / "data")
    expected, until, number, total = (
        references(folder, data),
        began + 60 * minutes,
        0,
        Counter[str](),
    )
    print(
        f"chaos: seed={seed} minutes={minutes:g}; runs that are left alone took {time.monotonic() - began:.0f} s",
        flush=True,
    )
    while number == 0 or time.monotonic() < until - 60:
        plan = PLANS[
            (seed + number) % len(PLANS)
        ]  # a short chaos begins with another one each time
        run = Run(folder / f"run_{number}", data, plan, random.Random(f"{seed} {number}"))
        name = f"run {number} of {' or '.join(map(str, plan))} processes"
        try:
            while not run.go_on(until):
                if time.monotonic() - told > 60:
                    told = time.monotonic()
                    at = (
                        json.loads((run.run / "STATUS.json").read_text()).get("step", 0)
                        if (run.run / "STATUS.json").exists()
                        else 0
                    )
                    print(
                        f"chaos: {told - began:.0f} s, {name} at step {at}, blows so far: "
                        f"{sum((total + run.blows).values())}",
                        flush=True,
                    )
            print(
                f"chaos: {name} is as if nothing had happened: {run.verify(expected[plan[0]])}",
                flush=True,
            )
        except Wrong as error:
            tail = (run.folder / "console.log").read_text().splitlines()[-60:]
            raise Wrong(
                "\n  ".join([f"{name}: {error}; it is left in {run.folder}", *tail])
            ) from None
        finally:
            for pid, _ in processes(run.folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        total += run.blows
        number += 1
    print(
        f"chaos: {number} runs, {sum(total.values())} blows in {time.monotonic() - began:.0f} s, all losses equal: "
        + ", ".join(f"{n} {what}" for what, n in total.most_common()),
        flush=True,
    )


def main():
    minutes = float(os.environ.get("CHAOS_MINUTES") or 10)
    seed = int(os.environ.get("CHAOS_SEED") or time.time())
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        chaos(folder, minutes, seed)
    except Wrong as error:
        print(f"chaos: seed={seed}: {error}", flush=True)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
