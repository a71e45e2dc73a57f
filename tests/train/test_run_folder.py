"""What a run leaves in its folder and says on the way."""

import json
import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from record.metrics import read_records
from tests.running import ROOT, environment, slow_steps, train, wait_for

PLAN = {
    "time": 0.0,
    "steps": 40,
    "seconds": 1.0,
    "tokens_per_s": 512.0,
    "memory_gib": 1.0,
    "energy_kwh": None,
}
SECRET = "hf_" + "q7Zk" * 8


@pytest.fixture(scope="module")
def said_and_run(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    (folder / "run").mkdir()
    (folder / "run" / "plan.json").write_text(json.dumps(PLAN))
    out = train(environment(folder, data, EVAL_EVERY=15, SAVE_EVERY=20, HF_TOKEN=SECRET))
    return out, folder / "run"


def test_every_step_has_a_record_with_all_keys_and_the_console_repeats_some(said_and_run):
    out, run = said_and_run
    records = list(read_records(run / "metrics.jsonl"))
    steps = [r for r in records if r["event"] == "step"]
    assert [r["step"] for r in steps] == list(range(1, 41))
    assert [r["tokens"] for r in steps[:2]] == [512, 1024]
    assert steps[-1]["lr"] == 3e-4  # as one types it; 3e-3 / 10 is another number
    for r in steps:
        assert {"time", "mono_s", "grad_norm", "mem_gib", "data_wait_s"} <= r.keys()
        assert r["mfu"] is None  # the peak of a CPU is not known
        assert r["tokens_per_s"] == pytest.approx(512 / (r["step_ms"] / 1000))
    assert [r["step"] for r in steps if "checkpoint_stall_s" in r] == [21]
    assert [r["event"] for r in records if r["event"] not in ("step", "checkpoint")] == [
        "start",
        "eval",
        "eval",
        "eval",
        "end",
    ]
    # each once it is on the disk, beside the steps
    assert [r["step"] for r in records if r["event"] == "checkpoint"] == [20, 40]
    lines = re.findall(
        r"^step=(\d+)/40 loss=([0-9.]+) lr=(\S+) grad_norm=\S+ step_ms=\S+ tokens_per_s=\d+ mfu=n/a "
        r"mem_gib=\S+ tokens=\d+(?: left=\d+:\d\d)?$",
        out,
        re.MULTILINE,
    )
    assert [int(step) for step, _, _ in lines] == [1, 5, 10, 15, 20, 25, 30, 35, 40]
    for step, loss, rate in lines:
        assert float(loss) == pytest.approx(steps[int(step) - 1]["loss"], abs=5e-5)
        assert float(rate) == pytest.approx(steps[int(step) - 1]["lr"], rel=1e-3)


def test_the_folder_holds_what_the_readme_says(said_and_run):
    out, run = said_and_run
    config = json.loads((run / "config.json").read_text())
    assert config["settings"]["N_EMBD"] == 32 and config["attempts"][0]["torch"]
    state = json.loads((run / "STATUS.json").read_text())
    assert (state["phase"], state["step"], state["last_step"]) == ("done", 40, 40)
    for log in ("train.log", "logs/node_0.log"):
        assert "step=40/40" in (run / log).read_text()
    assert (run / "sample.txt").read_text().startswith("def ")
    assert "sample, step 40" in out and "bits per byte on" in out


def test_it_ends_with_what_it_took_next_to_its_plan(said_and_run):
    out, run = said_and_run
    *_, end = read_records(run / "metrics.jsonl")
    goodput = end["goodput"]
    took_s = sum(goodput.values()) - goodput["start_up"] - goodput["down"]
    assert end["plan"]["seconds"] == [1.0, pytest.approx(took_s, abs=0.1)]
    assert end["plan"]["step_s"] == [1.0, pytest.approx(goodput["training"] / 40, rel=0.2)]
    assert re.search(r"^plan: predicted 0:01 and 1.0 GiB; took \d+:\d\d \(.*\) and ", out, re.M)


@pytest.mark.fault(21)
def test_a_secret_is_found_nowhere_in_the_folder_nor_in_what_is_said(said_and_run):
    out, run = said_and_run
    assert SECRET not in out
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_a_record_that_is_removed_or_damaged_between_two_starts_is_reported_at_the_second(
    tmp_path, data
):
    env, record = environment(tmp_path, data), tmp_path / "run" / "metrics.jsonl"
    train(env | {"MAX_STEPS": "10"})
    record.unlink()
    out = train(env | {"MAX_STEPS": "20"})
    gap, resume, *rest = read_records(record)
    assert (gap["event"], gap["reason"], gap["step"]) == ("gap", "record removed", 10)
    start_up_s = sum(resume["startup_s"].values())
    assert rest[-1]["goodput"]["start_up"] == pytest.approx(start_up_s, abs=0.01)
    assert f"{record}: was removed, replaced or cut, and what it had is gone" in out
    assert "continues at step 10" in out

    with open(record, "a") as file:
        file.write("no record\n")
    out = train(env | {"MAX_STEPS": "30"})
    before, _, after = out.partition("step=21/30")
    damage = " is damaged: it is not JSON. Damaged lines that are left out: 1"
    assert f"{record} line " in before and damage in before
    assert damage in after and "goodput " in after  # at the end once more
    events = [entry["event"] for entry in read_records(record)]
    assert events.count("gap") == 1 and events[-1] == "end"


@pytest.mark.slow
def test_closing_the_terminal_saves_and_stops_and_a_lost_one_does_no_harm(tmp_path, data):
    for name, hang_up in (("hung up", True), ("lost", False)):
        folder = tmp_path / name
        folder.mkdir()
        pid, terminal = pty.fork()
        if pid == 0:
            if not hang_up:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
            os.chdir(ROOT)
            os.execve(sys.executable, slow_steps(0.1), environment(folder, data))
        wait_for(folder / "run" / "metrics.jsonl", '"step": 3,')
        os.close(terminal)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        state = json.loads((folder / "run" / "STATUS.json").read_text())
        assert (code, state["phase"]) == ((75, "stopped") if hang_up else (0, "done"))
        assert (folder / "run" / "checkpoints" / f"step_{state['step']:07d}").is_dir()


def test_a_closed_pipe_does_not_end_a_run(tmp_path, data):
    env = environment(tmp_path, data)
    command = f"{sys.executable} -m train.main | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], env=env, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "run" / "STATUS.json").read_text())["phase"] == "done"


@pytest.mark.parametrize("name", ["metrics.jsonl", "tokenizer.json"])
def test_a_folder_in_the_place_of_a_file_is_named(tmp_path, data, name):
    (tmp_path / "run" / name).mkdir(parents=True)
    out = train(environment(tmp_path, data, MAX_STEPS=2), code=78)
    assert f"run/{name}: " in out and "Move it away" in out
    assert "Traceback" not in out
