"""Too little memory, of the machine or shared: said with the setting that helps, before the first step if it can be."""

import resource
import shutil
import subprocess

import pytest

from tests import running
from tests.faults.inject import Fault
from tests.faults.trial import LAUNCH


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    ("fault", "code", "steps"),
    [
        (Fault("rehearsal", "no memory"), 64, 0),
        (Fault("forward", "no memory", step=5), 1, 4),
    ],
    ids=["before the first step", "later"],
)
def test_too_little_memory_is_said_with_the_setting_that_helps(trial, fault, code, steps):
    out = trial.train(fault, code=code)
    assert "MICRO_BATCH_SIZE=4: a step of 4 sequences of 32 tokens does not fit into" in out
    assert "set MICRO_BATCH_SIZE=2 (the batch stays as it is, in more parts)" in out
    assert ("Traceback" in out) == (code == 1)
    assert len(trial.steps) == steps


@pytest.mark.slow
@pytest.mark.fault(34)
def test_memory_that_the_system_refuses_is_said_the_same_way(trial):
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))

    batch = {"SEQ_LEN": 1024, "BATCH_TOKENS": 2**20, "MICRO_BATCH_SIZE": 1024, "N_EMBD": 512}
    env = trial.env(**batch, TRAIN_TOKENS=2**22, WARMUP_TOKENS=0)
    out = running.train(env, code=64, preexec_fn=limit)
    assert "MICRO_BATCH_SIZE=1024: a step of 1024 sequences" in out
    assert "set MICRO_BATCH_SIZE=512" in out


@pytest.mark.slow
@pytest.mark.fault(38)
def test_a_tiny_shared_memory_is_enough_for_processes(trial, pair):
    """Nothing here uses /dev/shm: batches are made in the trainer itself, and checkpoints are copied within it."""
    script = 'mount -t tmpfs -o size=4k none /dev/shm && exec "$0"'
    apart = ["unshare", "--mount", "bash", "-c", script]
    if not shutil.which("unshare") or subprocess.run([*apart, "true"], check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    out = running.train(trial.env(NPROC=2), command=[*apart, *LAUNCH])
    assert "step=24/24" in out and trial.losses == pair.losses
