"""make certify: what it compares and writes, and what makes it fail. `.ci/run` runs the command itself."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bench.certify import __main__ as command
from bench.certify import small_run
from bench.certify.proofs import BLOWS, PROOFS, Certification, NotPromised
from bench.certify.small_run import Failed, SmallRun, hash_tensors
from settings import ROOT
from settings.resolve import resolve
from tests.train.checkpoint.test_find import make
from train.checkpoint import find

STEPS, EVERY = 48, 8  # of CERTIFY=short
ARITHMETIC = {"DEVICE": "cpu", "MAKE_TARGET": "certify", "DTYPE": "float32"}


class Trained:
    """Takes the place of training: runs have these results at once. The reference has those of `expected`."""

    def __init__(self):
        steps = {f"step {n}": f"{(4 - n / 50).hex()} {(1.5).hex()}" for n in range(1, STEPS + 1)}
        saved = {f"checkpoint {n}": f"{n:064x}" for n in range(EVERY, STEPS + 1, EVERY)}
        self.expected = steps | saved
        self.results = self.expected | {"checkpoint 21": "saved when it was stopped"}
        self.blows: list[tuple] = []

    def train(self, run):
        if run.paths.name != "reference":
            return self.results
        last = int(run.settings["MAX_STEPS"])
        return {key: value for key, value in self.expected.items() if int(key.split()[1]) <= last}


@pytest.fixture
def trained(monkeypatch):
    trained = Trained()
    monkeypatch.setattr(SmallRun, "start", lambda run, module: None)
    monkeypatch.setattr(SmallRun, "end", lambda run, process: 0)
    monkeypatch.setattr(SmallRun, "train", lambda run: trained.train(run))
    monkeypatch.setattr(
        SmallRun, "train_until_struck", lambda run, *blow: trained.blows.append(blow[:3])
    )
    return trained


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(command, "is_intel", lambda: False)


def certification(folder, **settings):
    config = resolve(ARITHMETIC | settings).check().config
    return Certification(folder / "work", "short", command.choose_settings(config))


def certify(monkeypatch, folder, *words, **settings):
    """Run the command. Returns the exit code."""
    typed = dict(word.split("=") for word in words)
    environ = ARITHMETIC | settings | typed | {"RUNS_DIR": str(folder), "CERTIFY": "short"}
    for name, value in (environ | {"MAKE_SETTINGS": " ".join(typed)}).items():
        monkeypatch.setenv(name, value)
    return command.main()


# ---- Proofs


def test_runs_that_equal_the_reference_pass(tmp_path, trained):
    text = certification(tmp_path).prove_killed(trained.expected)
    assert text == "3 kills and stops, at saves and evaluations: equal bit for bit"
    assert [blow[:2] for blow in trained.blows] == list(BLOWS[:3])
    assert "equal" in certification(tmp_path).prove_streamed(trained.expected)


def test_the_seed_chooses_when_a_run_is_struck(tmp_path, trained):
    moments = {}
    for seed in ("1", "1", "2"):
        trained.blows.clear()
        certification(tmp_path, SEED=seed).prove_killed(trained.expected)
        steps = [step for _, _, step in trained.blows]
        assert steps == sorted(steps) and moments.setdefault(seed, steps) == steps
    assert moments["1"] != moments["2"]


@pytest.mark.parametrize("proof", ["killed", "streamed"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step 30", f"{(3.4000000000000004).hex()} {(1.5).hex()}"),  # the last bit of the loss
        ("step 30", f"{(3.4).hex()} {(1.5000000000000002).hex()}"),
        ("step 30", None),
        ("checkpoint 48", f"{49:064x}"),  # as of a moment that was not restored
    ],
)
def test_the_first_difference_fails_and_is_named(tmp_path, trained, proof, key, value):
    trained.results[key] = value
    if value is None:
        del trained.results[key]
    trained.results["step 31"] = "later"
    with pytest.raises(Failed, match=f"^{key if 'step' in key else 'step 31'}: "):
        PROOFS[proof](certification(tmp_path), trained.expected)


def make_reference(folder):
    """Make the folder of a reference, with its checkpoints."""
    reference = folder / "work" / "reference"
    make(reference / "checkpoints", *range(EVERY, STEPS + 1, EVERY))
    (reference / "STATUS.json").touch()


def test_every_flipped_bit_must_be_refused(tmp_path, trained, monkeypatch):
    make_reference(tmp_path)
    proof = certification(tmp_path)
    with pytest.raises(Failed, match="was not set aside"):
        proof.prove_damaged(trained.expected)
    shutil.rmtree(tmp_path / "work" / "damaged")

    def train(run):
        steps, _ = find.find_verified(run.paths.checkpoints, 1)
        assert steps == [STEPS - EVERY]
        find.quarantine(run.checkpoint(STEPS), "damaged")
        return trained.results

    monkeypatch.setattr(SmallRun, "train", train)
    assert "48 bit flips refused" in proof.prove_damaged(trained.expected)
    shutil.rmtree(tmp_path / "work" / "damaged")
    sound = ([STEPS], [])
    monkeypatch.setattr("bench.certify.proofs.find_verified", lambda root, count: sound)
    with pytest.raises(Failed, match="a flipped bit was not noticed"):
        proof.prove_damaged(trained.expected)


@pytest.mark.parametrize(("apart", "passes"), [(9e-6, True), (1.1e-5, False)])
def test_on_another_number_of_processes_losses_are_close(
    tmp_path, trained, monkeypatch, apart, passes
):
    make_reference(tmp_path)
    trained.results["step 44"] = f"{(3.12 * (1 - apart)).hex()} {(1.5).hex()}"
    proof = certification(tmp_path)
    if passes:
        assert proof.prove_processes(trained.expected).endswith("losses agree to 9.0e-06")
        checkpoints = tmp_path / "work" / "processes" / "checkpoints"
        assert max(checkpoints.iterdir()).name == "step_0000040"
    else:
        with pytest.raises(Failed, match="losses differ by"):
            proof.prove_processes(trained.expected)


def test_nothing_is_claimed_of_bfloat16_on_another_number_of_processes(tmp_path):
    with pytest.raises(NotPromised, match="only float32"):
        certification(tmp_path, DTYPE="bfloat16").prove_processes({})


# ---- A run


def test_a_bit_or_a_name_of_any_tensor_changes_the_hash(tmp_path):
    state = {"model.w": torch.arange(6.0).reshape(2, 3), "optimizer.w.exp_avg": torch.ones(())}
    hashes = set()
    for number, change in enumerate(
        (
            {},
            {"optimizer.w.exp_avg": torch.tensor(1.0000001)},
            {"model.w": torch.arange(6.0).reshape(3, 2)},
            {"model.w": -torch.arange(6.0).reshape(2, 3)},  # of 0 the sign alone
        )
    ):
        for copy in "ab":  # is the same each time
            folder = tmp_path / f"{number}{copy}"
            dcp.save(dict(state | change), checkpoint_id=folder, no_dist=True)
        hashes.add(hash_tensors(folder))
        assert hash_tensors(tmp_path / f"{number}a") in hashes
    assert len(hashes) == 4


# An attempt that writes a record of four steps, saves and then evaluates.
WRITER = """
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
(folder / "STATUS.json").write_text('{"phase": "model"}')
with open(folder / "metrics.jsonl", "a", buffering=1) as record:
    for step in range(1, 5):
        time.sleep(0.1)
        line = {"schema": 1, "event": "step", "time": 1.0, "step": step}
        record.write(json.dumps(line) + "\\n")
time.sleep(0.1)
(folder / "checkpoints" / "step_0000004.tmp-new").mkdir()
time.sleep(0.1)
(folder / "STATUS.json").write_text('{"phase": "evaluating"}')
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("moment", ["step", "save", "evaluation"])
def test_a_run_is_struck_after_its_step_at_the_moment_asked_for(tmp_path, monkeypatch, moment):
    run = SmallRun(tmp_path / "work", "run", {})
    # An earlier attempt was killed while it evaluated, and another one while it saved.
    (run.paths.checkpoints / "step_0000008.tmp-old").mkdir(parents=True)
    run.paths.status.write_text('{"phase": "evaluating"}')
    old = {"schema": 1, "event": "step", "time": 1.0, "step": 9, "host": "here"}
    run.paths.metrics.write_text(json.dumps(old) + "\n")
    started: list[subprocess.Popen] = []

    def start(run, module, seconds="100"):
        command = [sys.executable, "-c", WRITER, str(run.paths.folder), seconds]
        environment = {"RUNS_DIR": str(run.work)}
        started.append(subprocess.Popen(command, env=environment))
        return started[-1]

    monkeypatch.setattr(SmallRun, "start", start)
    run.train_until_struck("everything", moment, 4, random.Random(1))
    assert started[0].returncode == -signal.SIGKILL
    there = {
        "step": run.paths.metrics.read_text().count("\n") == 5,
        "save": (run.paths.checkpoints / "step_0000004.tmp-new").exists(),
        "evaluation": "evaluating" in run.paths.status.read_text(),
    }
    assert there["step"] and there[moment]
    shutil.rmtree(run.paths.checkpoints / "step_0000004.tmp-new", ignore_errors=True)
    monkeypatch.setattr(SmallRun, "start", lambda run, module: start(run, module, "0"))
    with pytest.raises(Failed, match=f"ended before the {moment} after step 5"):
        run.train_until_struck("stop", moment, 5, random.Random(1))


def test_a_blow_that_missed_fails(tmp_path, monkeypatch):
    run = SmallRun(tmp_path / "work", "run", {})
    monkeypatch.setattr(
        SmallRun, "start", lambda *_: subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)
    )
    monkeypatch.setattr(small_run, "strike", lambda *blow: blow[2].communicate(b"end by itself\n"))
    with pytest.raises(Failed, match="ended before a rank was struck"):
        run.train_until_struck("a rank", "step", 0, random.Random(1))


def test_a_run_has_no_settings_but_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("SYNC", "diloco")
    monkeypatch.setenv("N_LAYER", "7")
    monkeypatch.setattr(small_run.subprocess, "Popen", lambda *_, env, **__: env)
    environment = SmallRun(tmp_path / "work", "run", {"NPROC": "2"}).start("train.launcher")
    assert environment["N_LAYER"] == "2" and environment["NPROC"] == "2"
    assert "SYNC" not in environment
    # Those of the preset are all given: else the certificate would depend on its file.
    preset = (ROOT / "presets" / "tiny.env").read_text()
    shaped = set(re.findall(r"^([A-Z_]+)=", preset, re.MULTILINE))
    proof = certification(tmp_path)
    assert shaped - {"DATA_MIX", "LOG_EVERY", "MID_DATA", "SFT_DATA", "TOKENIZER"} <= (
        proof.settings.keys() | small_run.SHAPE.keys()
    )


# ---- The certificate


@pytest.fixture
def made(tmp_path, monkeypatch, trained):
    """The path of a certificate."""
    proofs = {name: PROOFS[name] for name in ("killed", "streamed")}
    monkeypatch.setattr(command, "PROOFS", proofs)
    assert certify(monkeypatch, tmp_path) == 0
    (path,) = tmp_path.glob("certify/*.json")
    return path


def rewrite(path, **changes):
    """Change a certificate as a forger does, who knows how it is sealed."""
    content = json.loads(path.read_text()) | changes
    del content["sha256"]
    path.write_text(json.dumps(content | {"sha256": command.hash_content(content)}))


def test_a_certificate_says_what_was_compared_and_can_be_checked(
    made, tmp_path, monkeypatch, trained, capsys
):
    content = json.loads(made.read_text())
    assert content["results"] == trained.expected and content["settings"]["SEED"] == "1337"
    assert content["proofs"][0].startswith("PASS  killed     3 kills")
    page = made.with_suffix(".md").read_text()
    assert content["machine"]["code"] in page and trained.expected["checkpoint 48"] in page
    assert not made.with_suffix("").exists()
    chosen = []
    monkeypatch.setattr(command.secrets, "choice", lambda steps: chosen.append(steps) or 24)
    assert certify(monkeypatch, tmp_path, f"CHECK={made}") == 0
    assert "PASS  steps 1 to 24 of 48, trained again: equal bit for bit" in capsys.readouterr().out
    assert list(chosen[0]) == [8, 16, 24, 32, 40, 48]


@pytest.mark.parametrize("reseals", [False, True])
@pytest.mark.parametrize("key", ["step 3", "checkpoint 8"])
def test_an_edited_certificate_fails(made, tmp_path, monkeypatch, capsys, key, reseals):
    results = json.loads(made.read_text())["results"]
    if reseals:
        rewrite(made, results=results | {key: results["step 4"]})
    else:
        made.write_text(made.read_text().replace(results[key], results["step 4"]))
    monkeypatch.setattr(command.secrets, "choice", lambda steps: 8)
    assert certify(monkeypatch, tmp_path, f"CHECK={made}") == 1
    out = capsys.readouterr().out.splitlines()[-1]
    assert out.startswith(f"FAIL  {key}: " if reseals else f"FAIL  CHECK={made} was edited")


@pytest.mark.parametrize("name", command.COMPARED)
def test_on_another_machine_or_with_other_code_nothing_is_said_to_pass(
    made, tmp_path, monkeypatch, capsys, name
):
    content = json.loads(made.read_text())
    rewrite(made, machine=content["machine"] | {name: "another"})
    capsys.readouterr()
    assert certify(monkeypatch, tmp_path, f"CHECK={made}") == 78
    out = capsys.readouterr().out
    assert f"WARN  not comparable: {name} is " in out and "and was another" in out
    assert "PASS" not in out


def test_a_certificate_of_another_format_fails(made, tmp_path, monkeypatch, capsys):
    rewrite(made, schema=2)
    assert certify(monkeypatch, tmp_path, f"CHECK={made}") == 1
    assert "has format 2" in capsys.readouterr().out


def test_what_nobody_expected_keeps_the_runs(tmp_path, monkeypatch, trained):
    def train(run):
        raise AttributeError("no loss")

    monkeypatch.setattr(SmallRun, "train", train)
    with pytest.raises(AttributeError):
        certify(monkeypatch, tmp_path)
    assert list(tmp_path.rglob("*.env"))


def test_a_file_that_is_no_certificate_fails(tmp_path, monkeypatch, capsys):
    for content, reason in ((None, "does not exist"), ("[]", "is damaged"), ("{}", "was edited")):
        path = tmp_path / "file.json"
        if content:
            path.write_text(content)
        assert certify(monkeypatch, tmp_path, f"CHECK={path}") == 1
        assert reason in capsys.readouterr().out


def test_a_proof_that_fails_leaves_no_certificate_and_the_others_are_made(
    tmp_path, monkeypatch, trained, capsys
):
    def fail(*_):
        raise Failed("step 3: differs")

    def promise_nothing(*_):
        raise NotPromised("of bfloat16")

    proofs = {"killed": fail, "processes": promise_nothing, "streamed": PROOFS["streamed"]}
    monkeypatch.setattr(command, "PROOFS", proofs)
    assert certify(monkeypatch, tmp_path) == 1
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["FAIL", "killed"],
        ["WARN", "processes"],
        ["PASS", "streamed"],
    ]
    assert not list(tmp_path.glob("certify/*.json"))


# ---- Settings


@pytest.mark.parametrize(
    ("words", "settings", "reason"),
    [
        (["CHECK=c.json", "SEED=3"], {}, "SEED: Leave it out"),
        (["CHECK=c.json", "PRESET=tiny"], {}, "PRESET: Leave it out"),
        (["OPTIMIZER=muon", "PARALLEL=fsdp"], {}, "Muon needs whole matrices"),
        ([], {"OMP_NUM_THREADS": "2"}, "OMP_NUM_THREADS=2: Only on Intel"),
        (["N_LAYER=3"], {}, "N_LAYER (command line): Not used by make certify"),
    ],
)
def test_what_cannot_be_certified_is_refused(
    tmp_path, monkeypatch, capsys, words, settings, reason
):
    assert certify(monkeypatch, tmp_path, *words, **settings) == 64
    assert reason in capsys.readouterr().err and not list(tmp_path.glob("certify/*"))


def test_it_is_stopped_by_ctrl_c_and_leaves_nothing(tmp_path, monkeypatch, trained, capsys):
    def press(run):
        raise KeyboardInterrupt

    monkeypatch.setattr(SmallRun, "train", press)
    assert certify(monkeypatch, tmp_path) == 130
    assert "starts from the beginning" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.env"))
