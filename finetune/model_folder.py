"""The folder in Hugging Face format that MODEL, RUN_NAME or INIT_FROM stands for.

    runs/RUN_NAME  a run of ours: its export, which is made here if it is missing
    a folder       as it is
    OWNER/NAME     on the Hub: downloaded once, to DATA_DIR/models

From the Hub come the JSON files, the tokenizer and the safetensors of one commit: the one that was
seen first, unless @COMMIT names another. Code and pickles are left out. Each file must have the hash
that the Hub gives, and the folder counts once all of them are there.
"""

import dataclasses
import functools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from export.place import EARLIER, read_facts
from export.weight_files import has_hash_of
from record import number_formats, status
from record.default_run import require_run
from record.durable import write_whole
from record.exit_codes import BAD_SETTING
from record.run_paths import RunPaths
from settings import ROOT, ExpectedError, SettingsError
from settings.config import SETTINGS, Config
from settings.init_from import explain_missing
from settings.resolve import build_environment, find_explicit, show_path
from settings.resume import read_run_config
from settings.tuning_rules import NO_MODEL
from train.checkpoint.find import committed
from train.data.data_paths import data_dir
from train.data.prepare import one_at_a_time
from train.data.sources.hub import Again, ask
from train.data.sources.source import CorpusError
from train.distributed.world import World, broadcast_object, raise_on_all_ranks
from train.end_with_parent import end_with_parent
from train.generate.load_run import check_step, is_about_folder, no_checkpoint
from train.model.hf_import import ForeignError, weight_files
from train.run_folder import stored_config

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[0-9a-f]{7,40})?")
WANTED = re.compile(r"[^/]+\.(json|jinja|safetensors|model|txt)")  # in the root of the repository
WHOLE = ".whole.json"  # written last: the commit that a folder holds
HUB = "https://huggingface.co/"

log = logging.getLogger(__name__)


# ---- MODEL


def find(config: Config) -> Path:
    """Return the folder of MODEL if it is here already.

    Of a run of ours that is its export. If RUN_NAME was fine-tuned from an earlier one, it is that.

    Raises:
        SettingsError: MODEL names nothing.
        ForeignError: it must be downloaded or exported first.
    """
    if not config.model:
        raise SettingsError([NO_MODEL])
    place = ROOT / Path(config.model).expanduser()
    run = run_of(config)
    if run:
        place = run / "export"
        if not is_exported(run):
            raise ForeignError(
                f"MODEL={config.model}: The run has no export yet. `make finetune` makes it."
            )
    if place.is_dir():
        earlier = place.with_name(f"{EARLIER}{trained_from(config)}")
        return earlier if place.name == "export" and earlier.is_dir() else place
    if HUB_NAME.fullmatch(config.model):
        place = kept_at(config)
        if (place / WHOLE).is_file():
            return place
        raise ForeignError(
            f"MODEL={config.model}: Is not in {show_path(place)} yet. `make finetune` downloads it."
        )
    hint = status.suggest(RunPaths.of(config.runs_dir, config.model, ROOT))
    raise SettingsError(
        [
            f"MODEL={config.model}: There is no such run in {config.runs_dir} and no such folder, and "
            f"it is not a name on the Hugging Face Hub (OWNER/NAME). {hint}For example "
            "MODEL=models/qwen3-1.7b."
        ]
    )


def trained_from(config: Config) -> str:
    """Return the fingerprint of the model that RUN_NAME was fine-tuned from, "" if it has not begun."""
    stored = read_run_config(ROOT / config.run_folder / "config.json")
    attempts = stored.get("attempts") or [{}]
    return str(attempts[0].get("model_fingerprint", ""))


def run_paths(config: Config) -> RunPaths:
    return RunPaths.of(config.runs_dir, config.run_name, ROOT)


def is_here(config: Config) -> bool:
    """Tell whether MODEL need not be downloaded or exported first. Raises SettingsError."""
    try:
        find(config)
    except ForeignError:
        return False
    return True


def bring(config: Config) -> Path:
    """Return the folder of MODEL, after downloading or exporting it if needed.

    One process of a machine does that, and others wait for it.

    Raises SettingsError, ForeignError, CorpusError.
    """
    run = run_of(config)
    if run and not is_exported(run):
        return export_run(RunPaths(run), config)
    if not is_here(config):
        target = kept_at(config)
        with one_at_a_time(target):
            if not (target / WHOLE).is_file():
                try:
                    download(config, target)
                except (CorpusError, ForeignError) as error:
                    raise CorpusError(
                        f"MODEL={config.model}: There is no run and no folder of that name here, and "
                        f"on the Hub: {error}"
                    ) from error
    folder = find(config)
    if run:
        log_step(run, folder, config)
    return folder


def run_of(config: Config) -> Path | None:
    """Return the folder of the run that MODEL names, None if it names none."""
    for run in (ROOT / Path(config.model).expanduser(), ROOT / config.runs_dir / config.model):
        if (run / "checkpoints").is_dir():
            return run
    return None


def is_exported(run: Path) -> bool:
    return (run / "export" / "config.json").is_file()


def kept_at(config: Config) -> Path:
    return data_dir(config) / "models" / config.model.replace("/", "--")


def log_step(run: Path, folder: Path, config: Config) -> None:
    """Say which step of a run is used, and whether there is a newer one."""
    step = read_facts(folder).get("step")
    newest = max(committed(run / "checkpoints"), default=None)
    of_step = "" if step is None else f" (step {step})"
    log.info("Loading MODEL=%s from %s%s.", config.model, show_path(folder), of_step)
    if newest not in (None, step) and folder.name == "export":
        log.warning(
            "MODEL=%s: There is a newer checkpoint, of step %d. To use it: make export RUN_NAME=%s",
            config.model,
            newest,
            run.name,
        )


# ---- RUN_NAME or INIT_FROM


@dataclasses.dataclass(frozen=True)
class Weights:
    """What `make chat`, `make sample` and `make eval` open.

    Attributes:
        folder: in Hugging Face format.
        settings: the run's; {} for a folder.
    """

    folder: Path
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_tuned(self) -> bool:
        return bool(self.settings.get("MODEL"))

    @property
    def stop_token(self) -> str:
        """The token that the run ended replies with, "" if the chat template says it."""
        return str(read_facts(self.folder).get("stop_token", ""))

    @property
    def step(self) -> int | None:
        """Step of the run's checkpoint; None for a folder."""
        return read_facts(self.folder).get("step") if self.settings else None


def stored_settings(config: Config) -> dict[str, Any]:
    """Return the settings of the run that a command is about, {} if INIT_FROM is meant."""
    stored = stored_config(run_paths(config))
    settings: dict[str, Any] = stored.get("settings", {})
    if is_about_folder(config, settings.get("INIT_FROM", ""), find_explicit()):
        return {}
    return settings


def open_weights(config: Config) -> Weights:
    """Return the export of RUN_NAME at STEP, made if it is missing, or the folder of INIT_FROM.

    Raises SettingsError, RunFolderError, CheckpointError, ForeignError.
    """
    settings = stored_settings(config)
    if not settings and config.init_from:
        folder = ROOT / Path(config.init_from).expanduser()
        if not folder.is_dir():
            raise SettingsError([explain_missing(config.init_from)])
        return Weights(folder)
    require_run(config)
    return Weights(export_run(run_paths(config), config, config.step), settings)


def open_together(config: Config, world: World) -> Weights:
    """Do what `open_weights` does, once for all processes. Raises ExpectedError on all of them."""
    weights = None
    with raise_on_all_ranks(ExpectedError):
        if world.is_first:
            weights = open_weights(config)
    weights = broadcast_object(weights)
    assert weights
    return weights


def export_run(paths: RunPaths, config: Config, step: int | None = None) -> Path:
    """Return the export of a run, made if there is none of this step.

    It is made by `make export` with the run's own settings.

    Args:
        step: default: the newest checkpoint.

    Raises SettingsError, CheckpointError, ForeignError.
    """
    folder = paths.folder / "export"
    steps = committed(paths.checkpoints)
    wanted = step or max(steps, default=None)
    if wanted is None and is_exported(paths.folder):
        return folder
    if wanted is None:
        raise no_checkpoint(paths)
    check_step(wanted, steps, paths.name)
    with one_at_a_time(paths.checkpoints):  # whatever DATA_DIR a node has
        if is_exported(paths.folder) and read_facts(folder).get("step") == wanted:
            return folder
        log.info("Exporting step %d of %s to %s.", wanted, paths.name, show_path(folder))
        run_export(paths, config, wanted)
    size = sum(path.stat().st_size for path in folder.iterdir())
    log.info("The export takes %s of disk.", number_formats.size(size))
    return folder


def run_export(paths: RunPaths, config: Config, step: int) -> None:
    """Run `make export`. Raises SettingsError, ForeignError with what it says."""
    settings = {
        "RUN_NAME": paths.name,
        "RUNS_DIR": str(paths.folder.parent),
        "DATA_DIR": str(data_dir(config)),
        "STEP": str(step),
    }
    if config.hf_token:
        settings["HF_TOKEN"] = config.hf_token
    with tempfile.NamedTemporaryFile(suffix=".env") as empty:  # in place of .env
        child = subprocess.Popen(
            [sys.executable, "-m", "export"],
            cwd=ROOT,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=functools.partial(end_with_parent, signal.SIGTERM, os.getpid()),
            env=build_environment(settings | {"ENV_FILE": empty.name}, without=SETTINGS),
        )
        try:
            _, remarks = child.communicate()
        except KeyboardInterrupt:
            child.terminate()
            child.wait()  # until it has deleted what it wrote
            raise
    if child.returncode:
        problem = f"{paths.name}: The run cannot be exported: {remarks.strip()}"
        if child.returncode == BAD_SETTING:
            raise SettingsError([problem])
        raise ForeignError(problem)
    for remark in remarks.splitlines():
        log.warning("%s", remark)


# ---- The Hub


def download(config: Config, target: Path) -> None:
    """Download MODEL from the Hub, one file after the other. Raises CorpusError."""
    from huggingface_hub import HfApi, hf_hub_download

    name, _, commit = config.model.partition("@")
    api = HfApi(token=config.hf_token or None)
    info = ask(
        name,
        f"the model {name}",
        lambda: api.model_info(name, revision=commit or None, files_metadata=True),
        HUB,
    )
    files = [file for file in info.siblings or [] if WANTED.fullmatch(file.rfilename)]
    if not any(file.rfilename.endswith(".safetensors") for file in files):
        raise CorpusError(
            "it has no safetensors, and pickles are not read. Choose another model, or convert it and "
            "set MODEL to the folder."
        )

    def get(file: Any) -> None:
        path = Path(
            hf_hub_download(
                name, file.rfilename, revision=info.sha, token=api.token, local_dir=target
            )
        )
        if not has_hash_of(path, file):
            path.unlink()
            raise Again("its hash is not the one that the Hub gives")

    for number, file in enumerate(files, 1):
        log.info("MODEL=%s: file %d of %d, %s", config.model, number, len(files), file.rfilename)
        ask(name, f"{file.rfilename} of {name}", functools.partial(get, file), HUB)
    weight_files(target)  # or says which file is not there
    write_whole(target / WHOLE, json.dumps({"commit": info.sha}).encode())
    log.info("MODEL=%s: commit %s in %s", config.model, info.sha, show_path(target))
