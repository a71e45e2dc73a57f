"""Run two checkouts of this repository on the same input and compare what they do, to the bit.

    python -m tests.compare_editions OTHER_CHECKOUT [PART ..]       parts: plan settings logs data train cluster

Both are used as a user does, through make, each with the .venv in its own folder. The output may differ in
nothing but module paths, names of checkouts, times and what is measured: those are replaced before comparing.
Prints a line for each comparison; the exit code is 1 if any differs.
"""

import difflib
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from settings import ROOT
from tests.conftest import SHARED

RECIPE = {"MAX_STEPS": "200", "EVAL_EVERY": "50", "SAVE_EVERY": "40", "SEED": "7"}
KILL_AT = 90  # steps, between two checkpoints

# What may differ: a pattern and what it becomes.
INSTEAD = (
    (re.compile(r"\btrain\.prepare\b"), "train.data.prepare"),
    (re.compile(r"\btrain\.sites\.lighthouse\b"), "train.diloco.lighthouse"),
    (re.compile(r'pure-transformer/rendered: "[0-9a-f]{64}"'), "rendered: HASH"),
    # Comments of the page's code.
    (re.compile(r"^ *//.*\n|^ *\*.*\n|^ */\*.*\n", re.MULTILINE), ""),
    (re.compile(r"README\.md +[\d,]+"), "README.md"),  # the model card names the commit
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?"), "TIME"),
)
MEASURED_TEXT = re.compile(
    r"\b\d+(\.\d+)? ?(ms|s|m|MB|GB|GiB|tokens/s)\b"
)  # not in plans, manifests
MEASURED = {
    "time", "mono_s", "step_ms", "tokens_per_s", "mfu", "mfu_causal", "mem_gib", "data_wait_s",
    "checkpoint_stall_s", "seconds", "stall_s", "host", "elapsed_s", "eval_s", "own_ms",
}  # fmt: skip


class Edition:
    """A checkout, whose runs and data lie in a folder that has the same name for both."""

    def __init__(self, root: Path, work: Path):
        self.root, self.work = root, work

    def environment(self, **settings: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        places = {"RUNS_DIR": str(self.work / "runs"), "DATA_DIR": str(self.work / "data")}
        quiet = {
            "OMP_WAIT_POLICY": "PASSIVE",
            "ENV_FILE": "",
            "WANDB_MODE": "disabled",
            "DEVICE": "cpu",
            "COLUMNS": "100",
        }
        return kept | places | quiet | settings

    def make(self, *arguments: str, exact: bool = False, **settings: str) -> tuple[int, str]:
        """The exit code of `make ARGUMENTS` and what it printed. exact: nothing of it was measured."""
        done = subprocess.run(
            ["make", *arguments],
            cwd=self.root,
            env=self.environment(**settings),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        text = self.plain(done.stdout)
        return done.returncode, text if exact else MEASURED_TEXT.sub("N", text)

    def without(self, name: str) -> Path:
        """A folder of the work, which is not there."""
        shutil.rmtree(self.work / name, ignore_errors=True)
        return self.work / name

    def plain(self, text: str) -> str:
        """Text without what may differ between editions."""
        text = text.replace(str(self.root), "ROOT")
        text = re.sub(r"make: \*\*\* \[[^\]]*\]", "make: ***", text)
        for pattern, name in INSTEAD:
            text = pattern.sub(name, text)
        return text


def plans() -> Iterator[dict[str, str]]:
    """Settings of several hundred plans: every preset, on several cards, one change at a time."""
    presets = sorted(path.stem for path in (ROOT / "presets").glob("*.env"))
    cards = ("1xh100-sxm", "8xa100-80gb-sxm", "16xh200", "1xrtx4090", "2xh100-sxm,2xa6000")
    changes: tuple[dict[str, str], ...] = (
        {},
        {"TRAIN_TOKENS": "1000000000"},
        {"SEQ_LEN": "4096"},
        {"SYNC": "diloco", "SITES": "4", "NODES": "4"},
        {"PARALLEL": "fsdp", "ACTIVATION_CHECKPOINTING": "full"},
        {"OPTIMIZER": "muon", "DTYPE": "bfloat16"},
    )
    for preset, card, change in itertools.product(presets, cards, changes):
        # Without CARDS the plan times a product on this machine, which differs each time.
        yield {"PRESET": preset, "DEVICE": "cuda", "CARDS": card, "JSON": "1"} | change


def compare_plans(editions: list[Edition]) -> Iterator[tuple[str, Any, Any]]:
    for settings in plans():
        one, other = (edition.make("plan", exact=True, **settings) for edition in editions)
        yield f"plan {settings}", one, other
    for settings in (
        {"PRESET": "d16-2xh100", "DEVICE": "cuda", "CARDS": "2xh100-sxm", "SWEEP": "depth"},
        {
            "PRESET": "xlarge-8xa100",
            "DEVICE": "cuda",
            "CARDS": "8xa100-80gb-sxm",
            "SITES": "4",
            "NODES": "4",
        },
    ):
        one, other = (edition.make("plan", exact=True, **settings) for edition in editions)
        yield f"plan as text {settings}", one, other


def compare_settings(editions: list[Edition]) -> Iterator[tuple[str, Any, Any]]:
    """Every setting with values that cannot be, in three ways; what is shown; the example file."""
    example = (editions[0].root / ".env.example").read_text()
    names = re.findall(r"^#?([A-Z][A-Z0-9_]*)=", example, re.MULTILINE)
    yield (
        ".env.example",
        *(edition.plain((edition.root / ".env.example").read_text()) for edition in editions),
    )
    yield "settings", *(edition.make("settings") for edition in editions)
    checked = [
        name for name in names if name not in ("VENV", "TORCH_BACKEND", "PYTHON")
    ]  # of make setup
    for name, value in itertools.product(checked, ("-1", "x y", "1e400")):
        yield (
            f"{name}={value}",
            *(edition.make("check-env", f"{name}={value}") for edition in editions),
        )
    for typo in ("SEQ_LENGHT=3", "LR=1", "PRESET=nosuch", "NODES=3", "N_HEAD=3", "SITES=3"):
        yield typo, *(edition.make("check-env", typo) for edition in editions)


def compare_logs(editions: list[Edition]) -> Iterator[tuple[str, Any, Any]]:
    """Every log of another trainer that lies beside the repository: CSV, page, and what is printed."""
    if not (SHARED / "logs").is_dir():
        return
    results = []
    for edition in editions:
        logs = edition.without("logs")
        shutil.copytree(SHARED / "logs", logs)
        for path in sorted(logs.iterdir()):
            os.utime(path, (1.7e9, 1.7e9))
        printed = edition.make("plots", LOG_DIR=str(logs))
        files = {
            path.name: edition.plain(path.read_text())
            for path in sorted(logs.rglob("*"))
            if path.suffix in (".csv", ".html")
        }
        results.append((printed, files))
    yield "logs: printed", results[0][0], results[1][0]
    for name in sorted(results[0][1].keys() | results[1][1].keys()):
        yield f"logs: {name}", results[0][1].get(name), results[1][1].get(name)


def compare_data(editions: list[Edition]) -> Iterator[tuple[str, Any, Any]]:
    """The shards of the embedded corpus, and what is reported of them."""
    results = []
    for edition in editions:
        folder = edition.without("data")
        edition.make("data")
        files = {
            str(path.relative_to(folder)): hash_of(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        results.append((files, edition.make("data-verify"), edition.make("data-report")))
    yield "data: files", results[0][0], results[1][0]
    yield "data: verified", results[0][1], results[1][1]
    yield "data: report", results[0][2], results[1][2]


def compare_training(editions: list[Edition]) -> Iterator[tuple[str, Any, Any]]:
    """200 losses in hex, records, checkpoints, text and an export; then a run that is killed in the first
    edition and resumed in the second."""
    first, second = editions
    results = [trained(edition) for edition in editions]
    for part in results[0]:
        yield f"train: {part}", results[0][part], results[1][part]
    for one, other in ((first, second), (second, first)):
        killed = trained_after_a_kill(one, other)
        yield "train: killed in one edition and resumed in the other", results[0]["losses"], killed


def trained(edition: Edition) -> dict[str, Any]:
    run = edition.without("runs") / "run"
    code, _ = edition.make("train", RUN_NAME="run", **RECIPE)
    commands = {
        name: edition.make(name, RUN_NAME="run", PROMPT="def ", SAMPLE_TOKENS="40")
        for name in ("eval", "sample", "export", "status", "checkpoints")
    }
    return {
        "exit code": code,
        "losses": losses_of(run),
        "record": record_of(run),
        "config.json": json.loads((run / "config.json").read_text()).keys(),
        "checkpoints": tensors_of(run / "checkpoints"),
        "export": {path.name: hash_of(path) for path in (run / "export").glob("*.safetensors")},
        "columns": sorted(path.read_text().split("\n", 1)[0] for path in run.glob("training_*.csv")),
    } | commands  # fmt: skip


def trained_after_a_kill(one: Edition, other: Edition) -> list[str]:
    """Losses of a run that starts in one edition, is killed with SIGKILL, and ends in another."""
    run = one.without("runs") / "killed"
    environment = one.environment(RUN_NAME="killed", **RECIPE)
    process = subprocess.Popen(
        ["make", "train"],
        cwd=one.root,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while process.poll() is None and len(losses_of(run)) < KILL_AT:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    other.make("train", RUN_NAME="killed", **RECIPE)
    return losses_of(run)


def records(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def losses_of(run: Path) -> list[str]:
    """The loss of each step as the run finally has it, in hex."""
    steps = {record["step"]: record["loss"] for record in records(run) if record["event"] == "step"}
    return [float(steps[step]).hex() for step in sorted(steps)]


def record_of(run: Path) -> list[dict[str, Any]]:
    """The record without what is measured and without provenance."""
    found = []
    for record in records(run):
        if record["event"] in ("step", "eval", "checkpoint"):
            found.append({key: value for key, value in record.items() if key not in MEASURED})
    return found


def tensors_of(checkpoints: Path) -> dict[str, str]:
    """Hashes of the files with tensors, and the small states of every manifest."""
    found = {}
    for path in sorted(checkpoints.rglob("*.distcp")):
        found[str(path.relative_to(checkpoints))] = hash_of(path)
    for path in sorted(checkpoints.rglob("MANIFEST.json")):
        manifest = json.loads(path.read_text())
        states = {name: manifest.get(name) for name in ("data", "guard", "step")}
        found[str(path.relative_to(checkpoints))] = json.dumps(states, sort_keys=True)
    return found


def compare_cluster(editions: list[Edition]) -> Iterator[tuple[str, Any, Any]]:
    """The manifests of every kind of job."""
    kinds: tuple[dict[str, str], ...] = (
        {},
        {"NODES": "1", "GPUS_PER_NODE": "8"},
        {"NODES": "2", "GPUS_PER_NODE": "4"},
        {"SYNC": "diloco"},
        {"SITE": "ucsd"},
        {"DEVICE": "cpu"},
        {"NAMESPACE": "lab", "IMAGE_PULL_SECRET": "key", "TOLERATIONS": "gpu=yes"},
    )
    for kind in kinds:
        settings = {"DRY_RUN": "1", "IMAGE": "registry.example.org/lab/image:1"} | kind
        for target in ("train-8xa100", "data"):
            more = {"WHERE": "cluster"} if target == "data" else {}
            yield (
                f"make {target} {kind}",
                *(edition.make(target, exact=True, **settings, **more) for edition in editions),
            )


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


PARTS: dict[str, Callable[[list[Edition]], Iterator[tuple[str, Any, Any]]]] = {
    "plan": compare_plans,
    "settings": compare_settings,
    "logs": compare_logs,
    "data": compare_data,
    "train": compare_training,
    "cluster": compare_cluster,
}


def main(other: str, *parts: str) -> int:
    differing = compared = 0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for part in parts or PARTS:
            editions = [Edition(root, work / "work") for root in (Path(other).resolve(), ROOT)]
            for name, one, another in compare_in_turn(part, editions):
                compared += 1
                if one != another:
                    differing += 1
                    sys.stdout.write(f"DIFFERS  {name}\n{difference(one, another)}\n")
                    sys.stdout.flush()
    sys.stdout.write(f"{compared} comparisons, {differing} differ\n")
    return 1 if differing else 0


def difference(one: Any, other: Any) -> str:
    """The lines that only one of two results has, the first 40 of them, 200 characters each."""
    texts = [
        json.dumps(value, indent=1, default=str).replace("\\n", "\n") for value in (one, other)
    ]
    lines = difflib.unified_diff(*(text.splitlines() for text in texts), lineterm="", n=0)
    changed = [line[:200] for line in lines if line[:1] in "+-"]
    return "\n".join(changed[2:42])


def compare_in_turn(part: str, editions: list[Edition]) -> Iterator[tuple[str, Any, Any]]:
    for edition in editions:
        edition.work.mkdir(parents=True, exist_ok=True)
    yield from PARTS[part](editions)
    shutil.rmtree(editions[0].work)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
