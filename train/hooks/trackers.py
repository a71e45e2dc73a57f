"""W&B, TensorBoard and trackio: copies of a run's record. No other file imports their packages.

    metrics.jsonl -> rows -> tracker          a daemon thread per tracker, on the first rank

    python -m train.hooks.trackers            sends the record of RUN_NAME now (`make mirror`)

Each thread reads the record from its beginning and follows it. The record is the queue: a tracker that is slow, hangs or
fails holds up no step, and what it did not take is sent by the next attempt or by `make mirror`. A row has a position,
and those of steps that a resumed run repeats are sent once.
"""

import contextlib
import datetime
import json
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from record.durable import write_whole
from record.exit_codes import DONE, STOPPED
from record.locks import RunFolderError, is_at_work
from record.metrics import Record, RecordReader, is_number
from record.run_paths import RunPaths
from record.tracker_settings import BIN, check_trackers, find_mode, list_trackers
from settings import ROOT, ExpectedError, SettingsError, explain_error, load_config
from settings.config import Config
from settings.json_file import read_object
from settings.resolve import show_path
from settings.terminal import complain
from settings.visible_gpus import is_gpu_visible
from train.hooks.hook import Hook, Requests

if TYPE_CHECKING:
    from train.job import Job

# What trackers show, by the keys of a record. Of numbers by source or task, the source or task follows the name.
NAMES = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "step_ms": "perf/step_ms",
    "tokens_per_s": "perf/tokens_per_s",
    "mfu": "perf/mfu",
    "val_loss": "val/loss",
    "val_bpb": "val/bpb",
    "val_ppl": "val/perplexity",
    "core": "core/core",
    "core_partial": "core/partial",
    "core_margin": "core/margin",
    "core_tasks": "core/tasks",
    "val_loss_by_source": "val/loss/",
    "val_bpb_by_source": "val/bpb/",
    "core_centred": "core/",
}

POLL_S = 1.0  # between two looks at the record
READ_BYTES = 2**24  # at a time
INIT_S = 60  # for W&B to connect
STUCK_S = 120.0  # a thread that has not looked at the record for this long hangs in its tracker
DONE_S = 15.0  # how long the end of a run waits for the last upload
STOPPED_S = 3.0  # the same for a run that was stopped or failed: it may be killed soon
MIRROR_S = 600.0  # the same for `make mirror`


class Row(NamedTuple):
    """Values of one record by the names that trackers show; time in Unix seconds."""

    position: int
    step: int
    time: float
    values: dict[str, float]


def make_row(record: Record) -> Row:
    """Return the row of a step or evaluation, with the values that are known."""
    # The order in which a run writes the records of a step: the step, two evaluations, CORE.
    kind = 0
    if record["event"] == "eval":
        kind = 2 if record.get("full") else 1
    if "core" in record:
        kind = 3
    values = {}
    for key in NAMES.keys() & record.keys():
        value = record[key]
        parts = value if isinstance(value, dict) else {"": value}
        for part, number in parts.items():
            if is_number(number):
                values[NAMES[key] + part] = number
    with contextlib.suppress(KeyError, OverflowError):
        values["train/perplexity"] = math.exp(values["train/loss"])
    step = record["step"]
    return Row(4 * step + kind, step, record["time"], values)


class Tracker(threading.Thread):
    """The thread that sends a run's record to a tracker. Subclasses know how.

    Attributes:
        last_sent: position of the last row that the tracker has.
        exit_code: of the run, once it has ended.
        is_complete: set when the run writes no more.
        active_at: when the thread last looked at the record, in monotonic seconds.
        has_failed: whether the one warning was given.
    """

    title: str

    def __init__(self, config: Config, paths: RunPaths, say: Callable[[str], object]):
        super().__init__(daemon=True)
        self.config = config
        self.paths = paths
        self.say = say
        self.last_sent = -1
        self.exit_code = DONE
        self.is_complete = threading.Event()
        self.active_at = time.monotonic()
        self.has_failed = False

    def open(self) -> None:
        """Connect, and set `last_sent` where rows must not be sent again."""

    def send(self, rows: list[Row]) -> None:
        """Send rows, which are in order."""

    def close(self) -> None:
        """End, after the last row."""

    def run(self) -> None:
        """Send the record to its end."""
        try:
            self.open()
            reader = RecordReader(self.paths.metrics)
            is_last = False
            while not is_last:
                is_last = self.is_complete.wait(POLL_S)
                self.active_at = time.monotonic()
                while records := reader.read_new(READ_BYTES):
                    self.active_at = time.monotonic()
                    if rows := self.select(records):
                        self.send(rows)
            self.close()
        except (Exception, SystemExit) as error:  # whatever a package raises
            self.warn(f"{type(error).__name__}: {error}")

    def select(self, records: Iterable[Record]) -> list[Row]:
        """Return the rows that are due, without those that the tracker has."""
        rows = []
        for record in records:
            if self.is_due(record):
                row = make_row(record)
                if row.values and row.position > self.last_sent:
                    rows.append(row)
                    self.last_sent = row.position
        return rows

    def is_due(self, record: Record) -> bool:
        """Return whether trackers show this: an evaluation, every LOG_EVERY-th step, the first and the last."""
        if record["event"] != "step":
            return record["event"] == "eval"
        step = record["step"]
        return step % self.config.log_every == 0 or step in (1, self.config.last_step)

    def warn(self, problem: str) -> None:
        """Give the one warning."""
        if not self.has_failed:
            self.has_failed = True
            self.say(
                f"{self.title}: {' '.join(problem.split())}. Training is not affected. "
                f"To send the run later: make mirror RUN_NAME={self.config.run_name}"
            )


class WandbTracker(Tracker):
    """A run at W&B, online or in files.

    wandb.json keeps its id, so that a restart continues it. W&B wants its own step to grow with each row: that is the
    position, and charts are drawn over `step`.
    """

    title = "W&B"

    def open(self) -> None:
        self.state: dict[str, Any] = {"schema": 1, "id": secrets.token_hex(4), "sent": -1}
        with contextlib.suppress(FileNotFoundError, ValueError):
            self.state |= read_object(self.paths.wandb_state)
        self.write_state(where=None)  # the id, before W&B knows it
        mode = find_mode(self.config)
        self.there = self.connect(mode)
        self.there.define_metric("*", step_metric="step")
        if mode == "online":
            self.write_state(where=self.there.url, sent=self.there.starting_step - 1)
        else:
            files = show_path(self.paths.wandb)
            command = f"{BIN}/wandb sync {files}/offline-run-*"
            self.write_state(where=f"offline, in {files}. To upload it: {command}")
        self.last_sent = self.state["sent"]
        self.say(f"{self.title}: {self.state['where']}")

    def connect(self, mode: str) -> Any:
        """Start or continue the run. What is set here wins over W&B's own variables, such as WANDB_RUN_ID."""
        os.environ |= {
            "WANDB_MODE": mode,  # WANDB_MODE=auto is ours
            "WANDB_SILENT": "true",
            "WANDB_ERROR_REPORTING": "false",
        }
        import wandb

        config = self.config
        return wandb.init(
            project=config.wandb_project,
            entity=config.wandb_entity or None,
            id=self.state["id"],
            name=config.run_name,
            resume="allow",
            config=config.stored(),
            allow_val_change=True,
            settings=wandb.Settings(
                api_key=config.wandb_api_key or None,
                root_dir=str(self.paths.folder),
                use_dot_wandb=False,
                symlink=False,
                console="off",
                init_timeout=INIT_S,
                disable_code=True,
                disable_git=True,
                program="",
                x_disable_meta=True,
                x_save_requirements=False,
                x_disable_machine_info=not is_gpu_visible(),  # which are system metrics too
            ),
        )

    def send(self, rows: list[Row]) -> None:
        for row in rows:
            values = row.values | {"step": row.step, "_timestamp": row.time}
            self.there.log(values, step=row.position, commit=True)
        self.write_state(sent=rows[-1].position)

    def close(self) -> None:
        if self.exit_code == STOPPED:
            self.there.mark_preempting()
        self.there.finish(exit_code=self.exit_code)

    def write_state(self, **changes: Any) -> None:
        self.state |= changes
        write_whole(self.paths.wandb_state, json.dumps(self.state, indent=1).encode())


class TensorBoardTracker(Tracker):
    """An event file in RUN/tensorboard/, which each attempt writes anew from the record."""

    title = "TensorBoard"
    suffix = ".record"

    def open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = self.paths.folder / "tensorboard"
        for path in folder.glob(f"*{self.suffix}"):
            path.unlink()
        # purge_step: events that are not ours, of an earlier version, are not shown.
        self.writer = SummaryWriter(folder, purge_step=0, filename_suffix=self.suffix)
        self.say(f"{self.title}: {BIN}/tensorboard --logdir {show_path(folder.parent)}")

    def send(self, rows: list[Row]) -> None:
        for row in rows:
            for name, value in row.values.items():
                self.writer.add_scalar(name, value, row.step, row.time)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class TrackioTracker(Tracker):
    """A run in trackio's database: RUN/trackio/, or TRACKIO_DIR for a page of several runs.

    We write with trackio's storage class instead of `trackio.init` and `log`: those keep neither the time of a record
    nor an id by which a row is stored once. pyproject.toml pins the version for this.
    """

    title = "trackio"

    def open(self) -> None:
        folder = self.paths.folder / "trackio"
        database = os.environ.setdefault("TRACKIO_DIR", str(folder))
        for path in folder.glob("*"):
            if path.is_symlink():  # SQLite writes where it leads
                raise OSError(
                    f"{path}: is a link, and trackio would write where it leads. Remove it."
                )
        from trackio.sqlite_storage import SQLiteStorage

        self.storage = SQLiteStorage
        folder.mkdir(exist_ok=True)
        # A new run of the same name has another id.
        id_path = folder / "run_id"
        if not id_path.exists():
            write_whole(id_path, secrets.token_hex(8).encode())
        self.run_id = id_path.read_text()
        command = f"{BIN}/trackio show --project {self.config.wandb_project}"
        self.say(f"{self.title}: TRACKIO_DIR={database} {command}")

    def send(self, rows: list[Row]) -> None:
        """Store the rows. What has the id of a row that is there is left out."""
        times = [datetime.datetime.fromtimestamp(row.time, datetime.UTC) for row in rows]
        self.storage.bulk_log(
            self.config.wandb_project,
            self.config.run_name,
            [row.values for row in rows],
            [row.step for row in rows],
            [time.isoformat() for time in times],
            self.config.stored(),
            [f"{self.run_id}-{row.position}" for row in rows],
            run_id=self.run_id,
        )


TRACKERS: dict[str, type[Tracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorBoardTracker,
    "trackio": TrackioTracker,
}


class Trackers(Hook):
    """Feeds the trackers of a run, from the first rank."""

    def __init__(self) -> None:
        self.threads: list[Tracker] = []

    def at_start(self, job: "Job") -> None:
        if job.world.is_first:
            self.start(job.config, job.paths, job.recorder.say)

    def between_steps(self, job: "Job", requests: Requests) -> None:
        for thread in self.threads:
            if thread.is_alive() and time.monotonic() - thread.active_at > STUCK_S:
                thread.warn(f"no answer for {STUCK_S:.0f} s")

    def close(self, job: "Job", code: int, is_hurried: bool) -> bool:
        # A package that failed may wait for its server when Python ends.
        return not self.finish(code, STOPPED_S if is_hurried else DONE_S)

    def start(self, config: Config, paths: RunPaths, say: Callable[[str], object]) -> None:
        """Start a thread for each tracker that is on."""
        self.threads = [TRACKERS[name](config, paths, say) for name in list_trackers(config)]
        for thread in self.threads:
            thread.start()

    def finish(self, code: int, patience_s: float) -> bool:
        """Wait for the last rows of a run that ended with this exit code. Returns whether all are sent."""
        deadline = time.monotonic() + patience_s
        for thread in self.threads:
            thread.exit_code = code
            thread.is_complete.set()
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                thread.warn(f"not finished within {patience_s:.0f} s")
        return not any(thread.has_failed for thread in self.threads)


def mirror() -> int:
    """Send the record of RUN_NAME to its trackers. Returns the exit code."""
    try:
        config = load_config()
        check_trackers(config)
        if not list_trackers(config):
            raise SettingsError(
                [
                    "No tracker is on. Set WANDB_API_KEY in the environment or ENV_FILE, "
                    "WANDB_MODE=offline, or TRACKERS=tensorboard."
                ]
            )
        paths = RunPaths.of_node(config, ROOT)
        if not paths.metrics.exists():
            raise RunFolderError(f"There is no run {paths.folder}. `make runs` lists them.")
        if is_at_work(paths):
            raise RunFolderError(
                f"Run {paths.name} is running, and its trackers follow it. Send it when it has ended."
            )
    except ExpectedError as error:
        complain(explain_error(error))
        return error.exit_code
    trackers = Trackers()
    trackers.start(config, paths, lambda line: sys.stdout.write(f"{line}\n"))
    is_sent = trackers.finish(DONE, MIRROR_S)
    sys.stdout.flush()
    return int(not is_sent)


if __name__ == "__main__":
    os._exit(mirror())  # a package that failed may wait for its server when Python ends
