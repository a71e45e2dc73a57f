"""What may import what, and how long a file may be: read from the source, nothing is run but one import."""

import ast
import fnmatch
import functools
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from settings.declare import ROOT

# A module imports only from those before it. The record and the settings come first, then the flow, one way.
ORDER = ["settings", "wandb_env", "outside", "at_sites", "of_finetuning", "of_pipeline", "of_evaluation", "rules",
         "config", "env_example", "runs", "durable", "record", "goodput", "time_shares", "schedule", "cards", "flops",
         "sizes", "nccl_log", "status", "provenance", "ports", "rollcall", "wan", "rendezvous", "manifest",
         "corpus.source", "corpus.hub", "corpus.pin", "prepared", "corpus.fetch", "corpus.formats", "corpus.rows",
         "tokenizer", "shards", "making", "progress", "prepare", "overlap", "report_text", "report", "mixture",
         "stream", "guard", "straggler", "watchdog", "interrupt", "metrics", "mirror", "wandb_mirror", "distributed",
         "relay", "feed", "batch", "attention", "branches", "loss", "recompute", "model", "compilation", "optim",
         "foreign", "parallel", "step", "short_memory", "evaluate", "core.tasks", "core.download", "core.metric",
         "core.bundle", "core.prompts", "core.score", "cache", "sample", "chat", "checkpoint", "saver",
         "sites.striped", "sites.desk", "sites.lighthouse", "sites.outcome", "sites.engine", "sites.diloco", "job",
         "transport", "profiling", "recovery", "exchange", "run_folder", "trained", "sampling", "assemble", "eval_run",
         "loop", "main"]
STANDARD_LIBRARY_ONLY = ["settings", "wandb_env", "outside", "at_sites", "of_finetuning", "of_pipeline",
                         "of_evaluation", "rules", "config", "env_example", "runs", "durable", "record", "goodput",
                         "time_shares", "schedule", "cards", "flops", "sizes", "wan", "nccl_log", "status",
                         "provenance", "ports", "rollcall", "rendezvous", "guard", "straggler", "watchdog", "interrupt",
                         "metrics", "mirror", "manifest", "sites.desk", "sites.outcome"]
READS_ENVIRONMENT = {"settings/declare.py", "settings/wandb_env.py", "train/distributed/world.py", "train/diloco/__init__.py"}
TORCH_ROOMS = ("train", "finetune", "pipeline", "export", "bench", "wanlab")
LOADS_TORCH = "doctor.by_torch"  # the one module outside of TORCH_ROOMS that may: it is started
KNOWS_PROCESSES = {"train/distributed/world.py", "train/distributed/parallel.py", "train/checkpoint/checkpoint.py", "train/diloco/outer_step.py",
                   "train/diloco/allreduce.py", "bench/wan_lab/reduce.py", "export/stored.py"}
FINETUNE = ["shapes", "reading", "template", "store", "several", "subset", "packing", "batches", "preview", "choices",
            "origin", "weights", "adapter", "model", "data", "batch", "evaluate", "lite", "assemble", "main",
            "export", "exercises", "questions", "chat_eval"]  # as ORDER
MEASURES = {"bench/adapters.py": ["adapter", "lite", "model"]}  # what outside of it knows of it
LONGEST_FILE, LONGEST_LINE = 400, 120

ROOMS = [path for room in ("train", "finetune", "pipeline", "plan", "doctor", "monitor", "analysis", "export", "bench",
                           "wanlab", "k8s")
         for path in sorted((ROOT / room).rglob("*.py"))]
TRAIN = {".".join(path.relative_to(ROOT / "train").with_suffix("").parts): path for path in ROOMS
         if path.is_relative_to(ROOT / "train") and path.stem != "__init__"}
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SOURCES = ROOMS + TESTS + sorted((ROOT / "scripts").rglob("*"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def imported(tree: ast.AST) -> set[str]:
    """Dotted names of all that is imported anywhere in the tree, also inside functions: 'train.step', 'os.path'."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


def train_modules(tree: ast.AST) -> set[str]:
    """The modules of train/ that a tree imports."""
    return {module for module in TRAIN for name in imported(tree) if f"{name}.".startswith(f"train.{module}.")}


@functools.cache
def written(tree: ast.AST) -> set[str]:
    """Dotted names that are written out anywhere in the tree: 'os.environ', 'torch.distributed.barrier'."""
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def uses(tree: ast.AST, dotted: str) -> bool:
    """Whether a dotted name is imported or written out: os.environ, torch.distributed."""
    return any(name == dotted or name.startswith(dotted + ".") for name in written(tree) | imported(tree))


TREES = {path: ast.parse(path.read_text()) for path in ROOMS}


def test_every_module_has_its_place_in_the_order() -> None:
    assert sorted(TRAIN) == sorted(ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_a_module_imports_only_those_before_it(module: str) -> None:
    assert train_modules(TREES[TRAIN[module]]) <= set(ORDER[:ORDER.index(module)])


def test_fine_tuning_goes_one_way_and_what_other_rooms_know_of_it_is_named() -> None:
    found = {path.stem: path for path in ROOMS if path.is_relative_to(ROOT / "finetune") and path.stem != "__init__"}
    assert sorted(found) == sorted(FINETUNE)
    for path, tree in TREES.items():
        reached = {name.split(".")[1] for name in imported(tree) if name.startswith("finetune.")}
        known = FINETUNE[:FINETUNE.index(path.stem)] if path in found.values() else MEASURES.get(name_of(path),
                                                                                                 ["choices"])
        known = FINETUNE if path.is_relative_to(ROOT / "pipeline") else known
        assert reached <= set(known), name_of(path)


@pytest.mark.parametrize("module", STANDARD_LIBRARY_ONLY)
def test_what_everything_reads_needs_the_standard_library_only(module: str) -> None:
    packages = {name.split(".")[0] for name in imported(TREES[TRAIN[module]])} - {"train"}
    assert packages <= sys.stdlib_module_names
    assert train_modules(TREES[TRAIN[module]]) <= set(STANDARD_LIBRARY_ONLY)


def test_the_loop_is_the_last_but_one_and_only_fine_tuning_imports_main() -> None:
    assert ORDER[-2:] == ["loop", "main"]
    assert [name_of(path) for path, tree in TREES.items() if "main" in train_modules(tree)] == ["finetune/main.py"]


def test_no_monitor_and_no_analysis_reaches_torch() -> None:
    def reaches_torch(path: Path) -> bool:
        reached, ahead = {path}, [path]
        while ahead:
            tree = TREES[ahead.pop()]
            if any(name.split(".")[0] in ("torch", "transformers", "torchft") for name in imported(tree)):
                return True
            new = {TRAIN[module] for module in train_modules(tree)} - reached
            reached |= new
            ahead += new
        return False

    assert reaches_torch(TRAIN["loop"])
    outside = [path for path in ROOMS if path.relative_to(ROOT).parts[0] not in TORCH_ROOMS
               and name_of(path) != LOADS_TORCH.replace(".", "/") + ".py"]
    assert outside
    assert not [name_of(path) for path, tree in TREES.items() if LOADS_TORCH in imported(tree)]
    assert not [name_of(path) for path in outside if reaches_torch(path)]


def test_drawing_plots_loads_no_torch() -> None:
    code = "import sys, analysis.plots; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_environment_is_read_in_three_places() -> None:
    readers = {name_of(path) for path, tree in TREES.items()
               if any(uses(tree, name) for name in ("os.environ", "os.environb", "os.getenv", "os.putenv"))}
    assert readers == READS_ENVIRONMENT


def test_processes_are_known_in_three_places() -> None:
    knowing = {name_of(path) for path, tree in TREES.items()
               if uses(tree, "torch.distributed") or uses(tree, "torch.nn.parallel")}
    assert knowing == KNOWS_PROCESSES


def test_wandb_is_known_to_the_mirror_process_only_and_no_module_imports_that() -> None:
    assert [name_of(path) for path, tree in TREES.items() if uses(tree, "wandb")] == ["record/trackers/wandb_mirror.py"]
    assert not [name_of(path) for path, tree in TREES.items() if "wandb_mirror" in train_modules(tree)]


def test_nothing_is_printed_past_the_log() -> None:
    printing = [f"{name_of(path)}:{node.lineno}" for path, tree in TREES.items() for node in ast.walk(tree)
                if isinstance(node, ast.Name) and node.id == "print"]
    assert printing == []


@pytest.mark.parametrize("path", ROOMS + TESTS, ids=name_of)
def test_a_file_holds_one_idea(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST_FILE


def test_pytest_looks_into_every_folder_of_tests() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert {"dist", "faults", "unit"} <= folders
    assert not [name for name in folders if any(fnmatch.fnmatch(name, left) for left in options["norecursedirs"])]


def test_no_line_is_longer_than_a_screen() -> None:
    long = [f"{name_of(path)}:{number} has {len(line)}" for path in SOURCES if path.is_file() and "__pycache__" not in
            path.parts for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > LONGEST_LINE]
    assert long == []
