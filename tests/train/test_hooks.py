"""Each feature of a run can be taken out: by deleting its file and its line, and nothing else."""

import shutil
import subprocess
import sys

import pytest

from settings import ROOT
from tests.running import environment, losses

HOOKS = sorted(
    path.stem
    for path in (ROOT / "train/hooks").glob("*.py")
    if path.stem not in ("__init__", "hook")
)
STEPS = {"MAX_STEPS": 20, "EVAL_EVERY": 8, "SAVE_EVERY": 8, "SAMPLE_TOKENS": 6}

# Imports all of the trainer, and runs it.
RUN = """
import importlib, pathlib, sys
for path in sorted(pathlib.Path("train").rglob("*.py")):
    if path.stem not in ("__init__", "stuck_python"):
        importlib.import_module(".".join(path.with_suffix("").parts))
from train import main
sys.exit(main.main())
"""


def copy_without(folder, hook):
    """Copy the product, and delete this hook's file, its import and its line in the list."""
    rooms = ("settings", "record", "hardware", "train", "presets", "sources")
    for name in rooms:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "train/hooks" / f"{hook}.py").unlink()
    assemble = folder / "train/assemble.py"
    lines = assemble.read_text().splitlines(keepends=True)
    (found,) = (line for line in lines if line.startswith(f"from train.hooks.{hook} import "))
    name = found.split()[-1]
    kept = [line for line in lines if line != found and not line.lstrip().startswith(f"{name}(")]
    assert len(lines) - len(kept) == 2
    assemble.write_text("".join(kept))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    return train(tmp_path_factory.mktemp("whole"), data, ROOT)


def train(folder, data, where):
    env = environment(folder, data, **STEPS) | {"PYTHONPATH": str(where)}
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        env=env,
        cwd=where,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return losses(folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS)
def test_a_run_without_a_feature_has_the_same_losses(hook, tmp_path, data, whole):
    product, runs = tmp_path / "product", tmp_path / "runs"
    product.mkdir()
    runs.mkdir()
    copy_without(product, hook)
    found = train(runs, data, product)
    assert len(found) == 20 and found == whole
