"""What is wrong is said in one sentence before training, with the exit code that tells whether to retry."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from record import metrics as record_reader
from tests.conftest import make_data
from tests.running import environment, train


def no_training(folder: Path) -> bool:
    return not (folder / "run" / "metrics.jsonl").exists()


@pytest.mark.fault(24)
def test_settings_are_refused_together_with_code_64(tmp_path: Path, data: dict[str, str]) -> None:
    env = environment(tmp_path, data, LEARNING_RATE="nan", N_HEAD=5, SAVE_EVERY=-1, GRAD_CLIP="big")
    out = train(env, code=64)
    problems = out.partition("Invalid settings:\n")[2].splitlines()
    assert len(problems) == 4
    for name in (
        "LEARNING_RATE=nan",
        "N_HEAD = 10",
        "SAVE_EVERY=-1",
        "GRAD_CLIP=big",
    ):
        assert name in out
    assert not (tmp_path / "run").exists()


@pytest.mark.fault(22)
def test_a_gpu_that_is_not_there_is_an_error_and_no_slow_run(
    tmp_path: Path, data: dict[str, str]
) -> None:
    out = train(environment(tmp_path, data, DEVICE="cuda", CUDA_VISIBLE_DEVICES=""), code=64)
    assert "DEVICE=cuda" in out and "DEVICE=cpu" in out and "Traceback" not in out


def test_missing_data_names_the_command(tmp_path: Path, data: dict[str, str]) -> None:
    out = train(environment(tmp_path, data, DATA_DIR=tmp_path / "nowhere"), code=78)
    assert "make data" in out and "Traceback" not in out and no_training(tmp_path)


@pytest.mark.fault(11)
def test_an_error_page_as_shard_is_named_with_its_size(tmp_path: Path) -> None:
    own = make_data(tmp_path / "data")
    shard = next((tmp_path / "data").rglob("train_00001.bin"))
    shard.write_bytes(b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>".ljust(278))
    out = train(environment(tmp_path, own), code=78)
    assert (
        f"{shard}: not a token shard (278 bytes, starts with" in out
        and "error page" in out
        and "make data" in out
    )
    assert no_training(tmp_path)


@pytest.mark.fault(10)
def test_a_flipped_bit_in_a_shard_is_found_before_it_is_trained_on(tmp_path: Path) -> None:
    own = make_data(tmp_path / "data")
    shard = next((tmp_path / "data").rglob("train_00000.bin"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 4
    shard.write_bytes(content)
    out = train(environment(tmp_path, own), code=78)
    assert f"{shard}: damaged" in out
    assert not [
        r
        for r in record_reader.read_records(tmp_path / "run" / "metrics.jsonl")
        if r["event"] == "step"
    ]


@pytest.mark.fault(27)
def test_an_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    own = make_data(tmp_path / "data")
    manifest = next((tmp_path / "data").rglob("manifest.json"))
    content = json.loads(manifest.read_text())
    content["seals"][0]["train"]["max_id"] = 600
    manifest.write_text(json.dumps(content))
    out = train(environment(tmp_path, own), code=78)
    assert "token id 600" in out and "VOCAB_SIZE=512" in out and "601" in out


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(
    tmp_path: Path, data: dict[str, str]
) -> None:
    out = train(environment(tmp_path, data, VOCAB_SIZE=384), code=78)
    assert "512 entries" in out and "VOCAB_SIZE=512" in out


@pytest.mark.fault(32)
def test_a_second_trainer_on_a_run_folder_is_turned_away(
    tmp_path: Path, data: dict[str, str]
) -> None:
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / ".lock", "w") as lock:
        lock.write("pid 4711 on elsewhere")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        out = train(environment(tmp_path, data), code=78)
    assert "another process trains this run (pid 4711 on elsewhere)" in out and "RUN_NAME" in out
    train(environment(tmp_path, data, MAX_STEPS=2))


@pytest.mark.fault(8)
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_an_unwritable_run_folder_is_named(data: dict[str, str]) -> None:
    script = (
        "import os, sys, train.main\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sys.exit(train.main.main())"
    )
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        os.chmod(folder, 0o755)
        out = train(
            environment(Path(folder), data), command=[sys.executable, "-c", script], code=78
        )
    assert f"{folder}/run: cannot be written (Permission denied)" in out and "RUNS_DIR" in out
    assert "Traceback" not in out


@pytest.mark.fault(7)
@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("mount") is None, reason="needs root to mount a small disk"
)
def test_a_full_disk_is_said_before_training(tmp_path: Path, data: dict[str, str]) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "none", small], check=False
    ).returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        out = train(environment(tmp_path, data, RUNS_DIR=small), code=78)
        assert "a checkpoint takes" in out and "free; make room" in out and "Traceback" not in out
        assert no_training(small)
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.slow
@pytest.mark.fault(7)
@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("mount") is None, reason="needs root to mount a small disk"
)
def test_a_disk_that_fills_up_on_the_way_ends_nothing(tmp_path: Path, data: dict[str, str]) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", small], check=False
    ).returncode:
        pytest.skip("this machine lets nobody mount")
    script = (
        "import sys; from pathlib import Path; from train import loop; from train import main; from record import status; f = loop.lr_at\n"
        "status.BEAT_S = 0; filler = Path(sys.argv[1]) / 'filler'\n"
        "def fill(step, c):\n"
        "    if 6 <= step < 11 or step > 11 and sys.argv[2] == 'full':\n"
        "        with open(filler, 'ab', buffering=0) as file:  # again: a save that failed gave its room back\n"
        "            try:\n                while file.write(bytes(4096)): pass\n"
        "            except OSError: pass\n"
        "    if step == 11 and sys.argv[2] == 'freed': filler.unlink()\n"
        "    return f(step, c)\n"
        "loop.lr_at = fill; sys.exit(main.main())"
    )
    try:
        for name, code in (("freed", 0), ("full", 78)):
            env = environment(
                tmp_path, data, RUNS_DIR=small, RUN_NAME=name, SAVE_EVERY=4, MAX_STEPS=16
            )
            out = train(env, command=[sys.executable, "-c", script, str(small), name], code=code)
            assert (
                "checkpoint failed" in out
                and "Traceback" not in out
                and not list(small.rglob("*tmp*"))
            )
            assert out.count("STATUS.json: cannot be written (No space left on device)") == 1
            steps = [
                r["step"]
                for r in record_reader.read_records(small / name / "metrics.jsonl")
                if r["event"] == "step"
            ]
            assert (
                steps == list(range(1, 17 if name == "freed" else len(steps) + 1))
                and len(steps) >= 5
            )
    finally:
        subprocess.run(["umount", small], check=True)


POISON = """
import sys, time
from train import assemble; from train.data import batch; from train.checkpoint import checkpoint; from train import main
read = checkpoint.read_manifest
checkpoint.read_manifest = lambda folder: (time.sleep(seconds), read(folder))[1]  # a large one on a slow disk
build, batch_of, times, seconds = assemble.build, batch.Loader.batch, int(sys.argv[1]), float(sys.argv[2])

def poisoned(self, step, gaps=()):
    global times
    if step == 6 and times:
        times -= 1
        main.model.embed_tokens.weight.data[:] = float("nan")
    return batch_of(self, step, gaps)

def remembered(*args):
    main.model = build(*args)
    return main.model

batch.Loader.batch, assemble.build = poisoned, remembered
sys.exit(main.main())
"""


@pytest.mark.fault(16)
def test_weights_that_are_nan_are_those_of_the_last_checkpoint_again(
    tmp_path: Path, data: dict[str, str]
) -> None:
    env = environment(tmp_path, data, SAVE_EVERY=4, MAX_STEPS=12, TRAIN_TIMEOUT_S=12)
    out = train(env, command=[sys.executable, "-c", POISON, "1", "7"])
    assert "step 7: loss=nan" in out and "the step is skipped" in out and "Traceback" not in out
    assert "python-stdlib:epoch 0:train_0000" in out and "went back to step_0000004" in out
    records = list(record_reader.read_records(tmp_path / "run" / "metrics.jsonl"))
    fault = next(r for r in records if r["event"] == "nonfinite")
    assert fault["step"] == 7 and fault["loss"] is None and fault["samples"] == list(range(96, 112))
    assert [r["samples"] for r in records if r["event"] == "skip"] == [
        [96, 111],
        [112, 127],
        [128, 143],
    ]
    (back,) = [r for r in records if r["event"] == "rollback"]
    assert (back["step"], back["from"], back["passed_over"]) == (
        4,
        6,
        5 * 16,
    )  # steps 5, 6 and what was skipped
    assert [r["step"] for r in record_reader.keep_final_steps(records)] == list(range(1, 13))


@pytest.mark.slow
def test_a_run_that_goes_astray_again_and_again_ends_with_a_code_that_nobody_retries(
    tmp_path: Path, data: dict[str, str]
) -> None:
    env = environment(tmp_path, data, SAVE_EVERY=4, MAX_STEPS=12, MAX_ROLLBACKS=2)
    out = train(env, command=[sys.executable, "-c", POISON, "99", "0"], code=70)
    assert "going back 2 times did not help. Lower LEARNING_RATE" in out and "Traceback" not in out
    assert json.loads((tmp_path / "run" / "STATUS.json").read_text())["phase"] == "crashed"
    out = train(
        environment(tmp_path, data, RUN_NAME="none", MAX_STEPS=12),
        command=[sys.executable, "-c", POISON, "99", "0"],
        code=70,
    )
    assert "there is no checkpoint to go back to" in out


@pytest.mark.slow
@pytest.mark.fault(7)
def test_a_save_that_fails_on_the_way_is_tried_again_and_does_not_end_the_run(
    tmp_path: Path, data: dict[str, str]
) -> None:
    script = (
        "import sys, time; from train.checkpoint import checkpoint; from train import loop; from train import main\n"
        "f, rate, calls = checkpoint.check_space, loop.lr_at, []\n"
        "def slowly(*a):\n    time.sleep(0.5 * (len(calls) == 3)); return rate(*a)  # until it is tried again\n"
        "loop.lr_at = slowly\n"
        "def full(root, need):\n    calls.append(1)\n"
        "    if len(calls) == 3: raise checkpoint.CheckpointError('disk full')\n"
        "checkpoint.check_space = full; sys.exit(main.main())"
    )
    env = environment(tmp_path, data, SAVE_EVERY=8, MAX_STEPS=40, KEEP_LAST=9)
    out = train(env, command=[sys.executable, "-c", script])
    assert "checkpoint failed" in out and "disk full" in out and "it is tried again now" in out
    saved = [
        int(p.name.removeprefix("step_")) for p in (tmp_path / "run" / "checkpoints").iterdir()
    ]
    assert (
        {8, 24, 32, 40} < set(saved) and 16 not in saved and any(16 < step < 24 for step in saved)
    )


def test_without_checkpoints_in_words_nothing_is_saved(
    tmp_path: Path, data: dict[str, str]
) -> None:
    train(environment(tmp_path, data, SAVE_EVERY="0", MAX_STEPS=4))
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
