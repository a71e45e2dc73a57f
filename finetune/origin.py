"""MODEL to a folder in Hugging Face's format.

    runs/RUN_NAME  a run of ours: what make export made of it, or makes of its newest checkpoint where there is none
    a folder       as it is
    OWNER/NAME     on the hub: what is needed of it, kept in DATA_DIR/models from the first time on

Of the hub's files the JSON, the tokenizer and the safetensors are taken, of the commit that was seen first unless
@COMMIT says another; no code, no pickle. Each must have the hash that the hub gives. What was cut off is gone on with;
a folder counts once all of it is there.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from export.place import exported_step
from record import status
from record.durable import write_whole
from record.run_paths import RunPaths
from settings import ROOT, SettingsError
from settings.config import SETTINGS, Config
from settings.resolve import build_environment, show_path
from settings.tuning_rules import NO_MODEL
from train.checkpoint.find import committed
from train.children import end_with_parent
from train.data.data_paths import data_dir
from train.data.sources.hub import Again, ask
from train.data.sources.source import CorpusError
from train.model.hf_import import ForeignError, weight_files

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[0-9a-f]{7,40})?")
WANTED = re.compile(r"[^/]+\.(json|jinja|safetensors|model|txt)")  # of the repository's root
WHOLE = ".whole.json"  # written last: the commit that a folder holds
PAGE = "https://huggingface.co/"

log = logging.getLogger(__name__)


def find(c: Config) -> Path:
    """The folder of MODEL, where it is here already. Raises SettingsError, ForeignError."""
    if not c.model:
        raise SettingsError([NO_MODEL])
    if run := run_of(c):
        if is_exported(run):
            return run / "export"
        raise ForeignError(
            f"MODEL={c.model}: the run has no export yet, by which it is read and which make finetune "
            "makes on each machine"
        )
    if os.path.isdir(place := ROOT / Path(c.model).expanduser()):
        return place
    if HUB_NAME.fullmatch(c.model):
        kept = kept_at(c)
        if (kept / WHOLE).is_file():
            return kept
        raise ForeignError(
            f"MODEL={c.model}: has not been brought from the hub to {show_path(kept)} yet, which make "
            "finetune does on each machine"
        )
    hint = status.suggest(RunPaths.of(c.runs_dir, c.model, ROOT))
    raise SettingsError(
        [
            f"MODEL={c.model}: there is no such run in {c.runs_dir} and no such folder, and it is no name "
            f"on the Hugging Face hub (OWNER/NAME). {hint}For example MODEL=models/qwen3-1.7b"
        ]
    )


def is_here(c: Config) -> bool:
    """Whether MODEL need not be brought or exported first. Raises SettingsError."""
    try:
        find(c)
    except ForeignError:
        return False
    return True


def run_of(c: Config) -> Path | None:
    """The folder of the run of ours that MODEL names, None where it names none."""
    places = (ROOT / Path(c.model).expanduser(), ROOT / c.runs_dir / c.model)
    return next((run for run in places if (run / "checkpoints").is_dir()), None)


def is_exported(run: Path) -> bool:
    return (run / "export" / "config.json").is_file()


def kept_at(c: Config) -> Path:
    return data_dir(c) / "models" / c.model.replace("/", "--")


def bring(c: Config) -> Path:
    """The folder of MODEL, brought from the hub where that is where it is, exported where it is a run that was not; one
    process of a machine does, others wait. Raises SettingsError, ForeignError, CorpusError."""
    run, target = run_of(c), kept_at(c)
    try:
        folder = find(c)
        if run:
            say_age(run, folder, c)
        return folder
    except ForeignError:
        pass
    if run:
        with alone(run / "checkpoints"):  # whatever DATA_DIR a node has
            if not is_exported(run):
                export(run, c)
        return run / "export"
    with alone(target):
        if not (target / WHOLE).is_file():
            try:
                download(c, target)
            except CorpusError as error:
                raise CorpusError(
                    f"MODEL={c.model}: there is no run and no folder of that name here, and of the hub: "
                    f"{error}"
                ) from error
    return target


def say_age(run: Path, folder: Path, c: Config) -> None:
    """Which step of the run is read, and whether there is a newer one."""
    step, newest = exported_step(folder), max(committed(run / "checkpoints"), default=None)
    log.info(
        "Loading MODEL=%s from %s%s.",
        c.model,
        show_path(folder),
        "" if step is None else f" (step {step})",
    )
    if newest is not None and newest != step:
        log.warning(
            "MODEL=%s: its newest checkpoint is of step %d; make export RUN_NAME=%s renews the export",
            c.model,
            newest,
            run.name,
        )


def export(run: Path, c: Config) -> None:
    """make export of that run, by its own settings and none of these. Raises ForeignError."""
    log.info("MODEL=%s: the run has no export yet, by which it is read; making it", c.model)
    own = {
        "RUN_NAME": run.name,
        "RUNS_DIR": str(run.parent),
        "DATA_DIR": str(data_dir(c)),
        **({"HF_TOKEN": c.hf_token} if c.hf_token else {}),
    }
    with tempfile.NamedTemporaryFile(suffix=".env") as nothing:  # in the place of .env
        done = subprocess.run(
            [sys.executable, "-m", "export"],
            cwd=ROOT,
            text=True,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=functools.partial(end_with_parent, signal.SIGTERM),
            env=build_environment(own | {"ENV_FILE": nothing.name}, without=SETTINGS),
        )
    if done.returncode:
        raise ForeignError(
            f"MODEL={c.model}: the run cannot be exported, by which it is read: {done.stdout.strip()}"
        )
    log.info("%s", done.stdout.strip())


def download(c: Config, target: Path) -> None:
    """All files that are needed. Raises CorpusError."""
    from huggingface_hub import HfApi, hf_hub_download

    name, _, commit = c.model.partition("@")
    token = c.hf_token or None
    info = ask(
        name,
        f"the model {name}",
        lambda: HfApi(token=token).model_info(name, revision=commit or None),
        PAGE,
    )
    files = sorted(one.rfilename for one in info.siblings or [] if WANTED.fullmatch(one.rfilename))
    if not any(file.endswith(".safetensors") for file in files):
        raise CorpusError(
            f"MODEL={c.model}: the hub has no safetensors of it, and pickles are not read; take another "
            "model, or convert it and give the folder"
        )
    described = ask(
        name,
        f"the files of {name}",
        lambda: HfApi(token=token).get_paths_info(name, files, revision=info.sha),
        PAGE,
    )
    known = {one.path: one for one in described}
    began = time.monotonic()

    def get(file: str) -> None:
        path = Path(hf_hub_download(name, file, revision=info.sha, token=token, local_dir=target))
        if not is_whole(path, known.get(file)):
            path.unlink()
            raise Again("its bytes are not those that the hub has the hash of")

    for number, file in enumerate(files, 1):
        log.info("MODEL=%s: file %d of %d, %s", c.model, number, len(files), file)
        ask(name, f"{file} of {name}", functools.partial(get, file), PAGE)
    try:
        weight_files(target)
    except ForeignError as error:
        raise CorpusError(f"MODEL={c.model}: what the hub has is not whole: {error}") from error
    write_whole(target / WHOLE, json.dumps({"commit": info.sha, "files": files}).encode())
    log.info(
        "MODEL=%s: commit %s in %s, %.0f s",
        c.model,
        info.sha,
        show_path(target),
        time.monotonic() - began,
    )


def is_whole(path: Path, known: Any) -> bool:
    """Whether a file has the hash that the hub knows of it: sha256 of large ones, git's of others."""
    if known is None:
        return False
    with open(path, "rb") as file:
        if known.lfs:
            return bool(hashlib.file_digest(file, "sha256").hexdigest() == known.lfs.sha256)
        content = file.read()
    return bool(hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == known.blob_id)


@contextlib.contextmanager
def alone(target: Path) -> Iterator[None]:
    """One process of this machine at a time."""
    target.mkdir(parents=True, exist_ok=True)
    with open(target / ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
