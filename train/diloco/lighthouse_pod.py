"""The lighthouse of a job in the cluster, which ends when its run has. `make lighthouse` has no end.

    python -m train.diloco.lighthouse_pod

Each site's pod writes how it ended (RunPaths.last_word). What is older than this pod is from an
earlier job. Exit codes: 0 the run is over, 143 asked to stop, else that of the lighthouse.
"""

import contextlib
import os
import sys
import tempfile
import threading
from pathlib import Path

from record.exit_codes import BAD_DATA, BAD_SETTING, DONE, INTERRUPTED
from record.run_paths import RunPaths
from settings import ROOT, SettingsError
from settings.config import Config
from train.children import Children, complain, say

LOOK_S = 2.0
LIGHTHOUSE = [sys.executable, "-m", "train.diloco.lighthouse"]


def is_over(run: RunPaths, sites: int, since_ns: int) -> bool:
    """Whether no site will come back: all are done, or one ended the Job by its exit code."""
    done = 0
    for site in range(sites):
        word = run.of_site(site).last_word
        try:
            if word.stat().st_mtime_ns <= since_ns:
                continue
            code = int(word.read_text())
        except (OSError, ValueError):
            continue
        if code in (BAD_SETTING, BAD_DATA):
            return True
        done += code == DONE
    return done == sites


def mark_begin() -> int:
    """Return when this pod began, in ns, also if its container was restarted."""
    mark = Path(tempfile.gettempdir(), "lighthouse.begun")
    with contextlib.suppress(FileExistsError):
        mark.touch(exist_ok=False)
    return mark.stat().st_mtime_ns


def main() -> int:
    children = Children()
    try:
        config = Config.load()
    except SettingsError as error:
        complain(str(error))
        return BAD_SETTING
    run = RunPaths.of_node(config, ROOT)
    since_ns = mark_begin()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(LOOK_S):
            if is_over(run, config.sites, since_ns):
                say("lighthouse: the run is over")
                children.stop_child()
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = children.run(LIGHTHOUSE, os.environ)
    ended.set()
    watcher.join()
    if is_over(run, config.sites, since_ns):
        return DONE
    if children.stop_requested:
        return INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(main())
