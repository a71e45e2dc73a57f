"""Too little memory, of the machine or shared: said with the setting that helps, before the first step if it can be."""

import resource
import shlex
import shutil
import subprocess

import pytest

from record import metrics as record_reader
from tests.faults.conftest import LAUNCH, STEPS
from tests.faults.inject import Fault, faulty
from tests.running import environment, losses, train


@pytest.mark.fault(34)
def test_too_little_memory_shows_before_the_first_step_and_later_too(tmp_path, data):
    for name, fault, code in (
        ("first", Fault("rehearsal", "no memory"), 64),
        ("later", Fault("forward", "no memory", step=5), 1),
    ):
        (tmp_path / name).mkdir()
        out = train(
            faulty(environment(tmp_path / name, data, **STEPS), tmp_path / name, fault), code=code
        )
        assert (
            "MICRO_BATCH_SIZE=4: a step of 4 sequences of 32 tokens does not fit into the memory of CPU"
            in out
        )
        assert "set MICRO_BATCH_SIZE=2 (the batch stays as it is, in more parts)" in out
        assert ("Traceback" in out) == (name == "later")
        steps = [
            r
            for r in record_reader.read_records(tmp_path / name / "run" / "metrics.jsonl")
            if r["event"] == "step"
        ]
        assert len(steps) == (0 if name == "first" else 4)


@pytest.mark.slow
@pytest.mark.fault(34)
def test_memory_that_the_system_refuses_is_said_the_same_way(tmp_path, data):
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))

    env = environment(
        tmp_path,
        data,
        **STEPS
        | {
            "SEQ_LEN": 1024,
            "BATCH_TOKENS": 2**20,
            "MICRO_BATCH_SIZE": 1024,
            "TRAIN_TOKENS": 2**22,
            "WARMUP_TOKENS": 0,
            "N_EMBD": 512,
        },
    )
    out = train(env, code=64, preexec_fn=limit)
    assert (
        "MICRO_BATCH_SIZE=1024: a step of 1024 sequences" in out
        and "set MICRO_BATCH_SIZE=512" in out
    )


@pytest.mark.slow
@pytest.mark.fault(38)
def test_a_tiny_shared_memory_is_enough_for_processes(tmp_path, data, pair):
    """Nothing here uses /dev/shm: batches are made in the trainer itself, and checkpoints are copied within it."""
    apart = [
        "unshare",
        "--mount",
        "bash",
        "-c",
        'mount -t tmpfs -o size=4k none /dev/shm && exec "$0"',
    ]
    if (
        not shutil.which("unshare")
        or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this machine lets nobody mount")
    out = train(environment(tmp_path, data, NPROC=2, **STEPS), command=[*apart, *LAUNCH])
    assert "step=24/24" in out and losses(tmp_path / "run") == losses(pair), shlex.join(apart)
