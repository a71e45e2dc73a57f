"""What may be used where: read from the source. Which room may import which is in pyproject.toml, for lint-imports."""

import ast
import fnmatch
import functools
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from settings import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = PROJECT["tool"]["importlinter"]["root_packages"]
MODULES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
TREES = {path: ast.parse(path.read_text()) for path in MODULES}

READS_ENVIRONMENT = {
    "k8s/cluster/job_spec.py",  # variables of NCCL, for the pods
    # Those that start processes, and set what these read: threads, allocators, torchrun's variables.
    "doctor/gpu_probe/start.py",
    "finetune/pipeline/stages.py",
    "k8s/slurm.py",
    "k8s/slurm_batch.py",
    "k8s/slurm_node.py",
    "train/launcher.py",
    "train/start_node.py",
    "train/torchrun.py",
    "train/tune.py",
    "train/distributed/pod.py",  # K8S_NODE, by which a pod knows that it is one
    "settings/resolve.py",
    "settings/visible_gpus.py",
    "record/tracker_settings.py",
    "train/hooks/trackers.py",
    "train/distributed/transport.py",  # POD_NETWORK, which is no setting
    "train/distributed/world.py",
    "train/diloco/__init__.py",
}
ANSWERS_A_COMMAND = {"settings/cli.py", "train/tune.py"}  # what they print is what was asked for
KNOWS_PROCESSES = {
    "train/distributed/world.py",
    "train/distributed/fsdp_waits.py",
    "train/distributed/parallel.py",
    "train/checkpoint/checkpoint.py",
    "train/checkpoint/metadata.py",
    "train/diloco/site.py",
    "train/diloco/allreduce.py",
    "train/torchrun.py",
    "bench/wan_lab/reduce.py",
    "bench/gpu_rehearsal/fake_cuda.py",
    "export/stored.py",
}
# These need the standard library and each other only: shell scripts start them many times, also
# before setup has run. A package stands for all its modules.
STANDARD_LIBRARY_ONLY = (
    "settings",
    "record",
    "hardware.flops",
    "hardware.gpu_specs",
    "hardware.host_memory",
    "hardware.model_size",
    "hardware.ports",
    "train.children",
    "train.data.manifest",
    "train.diloco.result",
    "train.diloco.site_registry",
    "train.distributed.pod",
    "train.distributed.registry",
    "train.distributed.rendezvous",
    "train.distributed.run_secret",
    "train.distributed.signed_http",
    "train.distributed.signals",
    "train.end_with_parent",
    "train.faults.guard",
    "train.faults.stuck_python",
    "train.faults.watchdog",
    "train.schedule",
    "train.timeouts",
)
IMPORTED_ONLY_BY = {  # others start these as processes of their own
    "train.main": {"finetune/main.py"},
    "doctor.by_torch": set(),
    "doctor.gpu_probe.probe": set(),
    "doctor.gpu_probe.probe_disk": set(),
}
SAME_NAME_IN_FOLDERS_THAT_TELL_THEM_APART = {
    "__main__": 11,
    "diloco": 2,  # train/hooks/, plan/network/
    "main": 2,  # train/, finetune/: what torchrun starts
    "manifest": 2,  # train/checkpoint/, train/data/
    "panels": 2,  # analysis/, monitor/
    "result": 2,  # analysis/energy/, train/diloco/
    "runs": 2,  # analysis/, analysis/logs/
    "report": 2,  # plan/, train/data/audit/
    "summary": 2,  # analysis/, finetune/pipeline/
    # In settings/ a file is called by the subject of its settings.
    "checks": 2,  # and plan/
    "cluster": 2,  # and monitor/
    "run": 3,  # plan/, bench/
    "resume": 2,  # and train/checkpoint/
    "sampling": 2,  # and monitor/gpu_sampler/
    "training": 2,  # and bench/wan_lab/
}
MOST_MODULES, MOST_FILES_AT_THE_TOP = 26, 14


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def names_in(tree: ast.AST) -> set[str]:
    """Dotted names that are imported or written out anywhere in a module: 'os.environ', 'torch.distributed.barrier'."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return names


def uses(tree: ast.AST, dotted: str) -> bool:
    return any(name == dotted or name.startswith(dotted + ".") for name in names_in(tree))


def users_of(*dotted: str) -> set[str]:
    return {
        name_of(path) for path, tree in TREES.items() if any(uses(tree, name) for name in dotted)
    }


def test_the_environment_is_read_in_few_places() -> None:
    assert users_of("os.environ", "os.environb", "os.getenv", "os.putenv") == READS_ENVIRONMENT


def test_processes_are_known_in_few_places() -> None:
    assert users_of("torch.distributed", "torch.nn.parallel") == KNOWS_PROCESSES


def test_nothing_is_printed_past_the_log() -> None:
    printing = [
        f"{name_of(path)}:{node.lineno}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "print"
        if name_of(path) not in ANSWERS_A_COMMAND
    ]
    assert printing == []


@pytest.mark.parametrize(
    "module",
    [
        "analysis.compare",
        "analysis.plots",
        "plan.__main__",
        "monitor.__main__",
        "k8s.jobs",
        "doctor.__main__",
        "scripts.train",
    ],
)
def test_a_command_that_needs_no_torch_loads_none(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_what_every_script_starts_needs_the_standard_library_only() -> None:
    modules = [path for path in MODULES if is_for_every_script(module_of(path))]
    assert len(modules) > 40
    foreign = {
        f"{name_of(path)}: {name}"
        for path in modules
        for name in imports_of(path)
        if name.split(".")[0] not in sys.stdlib_module_names and not is_for_every_script(name)
    }
    assert foreign == set()


def is_for_every_script(module: str) -> bool:
    return any(f"{module}.".startswith(f"{name}.") for name in STANDARD_LIBRARY_ONLY)


def test_what_is_started_is_not_imported() -> None:
    for module, importers in IMPORTED_ONLY_BY.items():
        found = {name_of(path) for path in MODULES if module in imports_of(path)}
        assert found == importers, module


def module_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULE_NAMES = {module_of(path) for path in MODULES}


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports, also inside functions: `from train import step` is train.step."""
    modules = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                modules.add(full if full in MODULE_NAMES else str(node.module))
    return modules


def test_a_module_is_found_by_its_name() -> None:
    names = Counter(path.stem for path in MODULES if path.stem != "__init__")
    assert {
        name: count for name, count in names.items() if count > 1
    } == SAME_NAME_IN_FOLDERS_THAT_TELL_THEM_APART


def test_no_folder_is_crowded() -> None:
    folders = defaultdict(list)
    for path in MODULES:
        if path.stem != "__init__":
            folders[name_of(path.parent)].append(path.name)
    assert {
        folder: len(files) for folder, files in folders.items() if len(files) > MOST_MODULES
    } == {}


def test_the_top_of_the_repository_is_short() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    files = [path for path in listed.splitlines() if "/" not in path]
    assert len(files) <= MOST_FILES_AT_THE_TOP, files


def test_pytest_looks_into_every_folder_of_tests() -> None:
    left_out = PROJECT["tool"]["pytest"]["ini_options"]["norecursedirs"]
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert {"train", "faults", "k8s"} <= folders
    assert not [
        name for name in folders if any(fnmatch.fnmatch(name, pattern) for pattern in left_out)
    ]
