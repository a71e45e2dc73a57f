"""Runs whose processes are killed and told to stop at random, started again until they are done, and compared with
runs that were left alone: the losses must be equal, hex for hex.

    python -m tests.faults.chaos          CHAOS_MINUTES (default 10), CHAOS_SEED (default: by the clock; it is printed)

A run is started as a cluster would: scripts/launch.sh with the same settings, again whenever it ended with anything
but 0. Where the number of processes changes on the way, sums are made in another order: losses then agree to 1e-5.
Exit code 1 with the seed, and the folder left as it is, where anything is not as it must be.
"""

import contextlib
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.certify import strike as certify
from tests.conftest import make_data
from tests.faults.inject import Fault
from tests.faults.trial import LAUNCH, Trial
from tests.running import ROOT
from train.checkpoint import manifest

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
# Else a run would be done before anything happens to it.
SLOWLY = Fault("step", "sleep", value=0.08, every=True)
PLANS = ((2,), (1,), (2,), (4,), (1, 2, 4))  # processes of a run; of several one at each start
CLOSE = 1e-5
PATIENCE_S = 600.0  # for a launcher that was told to stop, and for a run that is left alone
BLOWS = ("a rank", "a rank", "torchrun", "all ranks", "everything", "stop", "stop")


class Wrong(Exception):
    """Something is not as it must be; the message says what."""


def train(trial, plan, rng, until):
    """Start a run, and strike it, until it is done. until: no blow falls after that."""
    code = None
    while code != 0:
        env = trial.env(SLOWLY, NPROC=rng.choice(plan), MAX_RESTARTS=20)
        with open(trial.folder / "console.log", "a") as console:
            launcher = subprocess.Popen(
                LAUNCH, env=env, cwd=ROOT, stdout=console, stderr=console, start_new_session=True
            )
        code = wait_and_strike(trial, launcher, rng, until)
        if code in (64, 70, 78):
            raise Wrong(f"it ended with code {code}, which no cluster would start again")


def wait_and_strike(trial, launcher, rng, until):
    """Return the launcher's exit code."""
    while True:
        pause = rng.uniform(2, 14)
        is_left_alone = time.monotonic() + pause > until
        try:
            return launcher.wait(PATIENCE_S if is_left_alone else pause)
        except subprocess.TimeoutExpired:
            if is_left_alone:
                raise Wrong(f"left alone, it is not done in {PATIENCE_S:.0f} s") from None
        strike(trial, launcher, rng)


def strike(trial, launcher, rng):
    """One blow, to whatever of the run is there."""
    blow = rng.choice(BLOWS)
    certify.strike(blow, trial.folder, launcher, rng)
    if blow != "stop":
        return
    try:
        code = launcher.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise Wrong(f"told to stop, it goes on after {PATIENCE_S:.0f} s") from None
    if code not in (0, 75, 143):
        raise Wrong(f"told to stop, it ended with code {code}")


def verify(trial, plan, expected):
    """Raise Wrong unless it is as if nothing had happened. expected: losses of a run that was left alone."""
    trial.wait_until_gone()
    losses = trial.losses
    if losses.keys() != expected.keys():
        raise Wrong(f"steps are missing: {sorted(expected.keys() - losses.keys())}")
    for step, values in losses.items():
        is_equal = values == expected[step]
        if len(plan) > 1:
            is_equal = abs(values[0] / expected[step][0] - 1) < CLOSE
        if not is_equal:
            raise Wrong(f"step {step}: loss and norm {values}, left alone {expected[step]}")
    # A save may be killed before it is reported: the next attempt resumes from it.
    reports = trial.events("checkpoint") + trial.events("resume")
    newest = sorted({report["step"] for report in reports})[-SETTINGS["KEEP_LAST"] :]
    if trial.saved != newest or newest[-1] != SETTINGS["MAX_STEPS"]:
        raise Wrong(f"there are checkpoints {trial.saved}, the newest written are {newest}")
    for folder in trial.checkpoints.iterdir():
        manifest.verify(folder)
    phase = json.loads((trial.run / "STATUS.json").read_text())["phase"]
    if phase != "done":
        raise Wrong(f"STATUS.json says {phase}")


def chaos(folder, minutes, rng):
    data = make_data(folder / "data")

    @functools.cache
    def expected(nproc):
        alone = Trial(folder / f"alone_{nproc}", data, **SETTINGS, NPROC=nproc)
        alone.train()
        return alone.losses

    number, until = 0, time.monotonic() + 60 * minutes
    first = rng.randrange(len(PLANS))  # a short chaos begins with another one each time
    while number == 0 or time.monotonic() < until - 60:
        plan = PLANS[(first + number) % len(PLANS)]
        left_alone = expected(plan[0])
        with contextlib.closing(Trial(folder / f"run_{number}", data, **SETTINGS)) as trial:
            try:
                train(trial, plan, rng, until)
                verify(trial, plan, left_alone)
            except Wrong as error:
                tail = (trial.folder / "console.log").read_text().splitlines()[-60:]
                where = f"{error}; it is left in {trial.folder}"
                raise Wrong("\n  ".join([where, *tail])) from None
        number += 1
        print(
            f"chaos: run {number}, of {plan} processes, is as if nothing had happened", flush=True
        )


def main():
    minutes = float(os.environ.get("CHAOS_MINUTES") or 10)
    seed = int(os.environ.get("CHAOS_SEED") or time.time())
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"chaos: seed={seed} minutes={minutes:g}", flush=True)
    try:
        chaos(folder, minutes, random.Random(seed))
    except Wrong as error:
        print(f"chaos: seed={seed}: {error}", flush=True)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
