"""Runs the tests that carry a fault's number, and whatever is too slow for make test, a few files at a time.

    python -m tests.faults.pool [WORKERS]      (default: one more than there are cores, since much of it is waiting)

With FAULTS=slow only what is too slow for make test: where that has just run all else. Runs that nothing happened to
are made once for all (conftest.py). The last line counts as pytest's does.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.running import ROOT

MARKS = ("slow",) if os.environ.get("FAULTS") == "slow" else ("fault", "slow")
CHOSEN = re.compile(rf"pytest\.mark\.({'|'.join(MARKS)})\b")
LONGEST = ("faults/test_stream", "faults/test_kill", "faults/test_hang", "dist/", "scripts/test_resume",
           "scripts/test_wandb", "scripts/test_bad_input")
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|xfailed|xpassed|error)s?\b")


def groups() -> list[list[str]]:
    """Files that go to a worker together: those that take long first, those of modules all at once and last."""
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if CHOSEN.search(path.read_text()))
    names = [str(path.relative_to(ROOT)) for path in files if path.parent.name != "gpu"]
    alone = [name for name in names if "/unit/" not in name]
    alone.sort(key=lambda name: (not any(long in name for long in LONGEST), "/faults/" not in name, name))
    return [[name] for name in alone] + [[name for name in names if "/unit/" in name]]


def run(files: list[str], shared: str) -> tuple[Counter[str], int]:
    """What pytest counted, and its exit code; its words are printed at once."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "pytest", "-m", " or ".join(MARKS), "--durations=3",
                           "--durations-min=20", *files], cwd=ROOT, text=True, check=False, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env=os.environ | {"FAULTS_SHARED": shared})
    last = (done.stdout.strip().splitlines() or [""])[-1]
    name = files[0] if len(files) == 1 else f"tests/unit ({len(files)} files)"
    sys.stdout.write(f"faults: {name}: {time.monotonic() - began:.0f} s: {last}\n")
    slow = "".join(f"  {line}\n" for line in re.findall(r"^[0-9.]+s call .*", done.stdout, re.MULTILINE))
    sys.stdout.write(done.stdout if "failed" in last or "error" in last else slow)
    sys.stdout.flush()
    nothing_chosen = 5  # pytest's code for it
    return (Counter({what: int(count) for count, what in COUNTS.findall(last)}),
            0 if done.returncode == nothing_chosen else done.returncode)


def main(argv: list[str]) -> int:
    workers, began = int(argv[0]) if argv else (os.cpu_count() or 1) + 1, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as shared, ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(lambda files: run(files, str(Path(shared))), groups()))
    total: Counter[str] = sum((counts for counts, _ in results), Counter())
    words = ", ".join(f"{total[what]} {what}" for what in ("failed", "passed", "skipped", "xfailed", "xpassed", "error")
                      if total[what])
    sys.stdout.write(f"{words} in {time.monotonic() - began:.2f}s\n")
    return max(code for _, code in results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
