"""The mirror process: follows a run's metrics.jsonl and logs it to Weights & Biases. Started by mirror.py.

    metrics.jsonl -> complete lines -> rows, one a step -> W&B

Every LOG_EVERY-th step, the first and last, and all evaluations. wandb.json keeps the run's id, so that a restart
continues the same run, and the last step that W&B has: steps are given once, also where the trainer went back to
an older checkpoint. A row goes out when a later one begins, and so with its evaluation. End of standard input: the
trainer is gone; what it left is mirrored, and the run marked finished only if its record says so.
Standard output: one line for the user on each thing that happens, once. Details: logs/wandb.log.
"""

import contextlib
import fcntl
import json
import math
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from record import reader
from record.run_paths import RunPaths
from record.status import sync_command
from settings.config import Config
from settings.declare import ROOT, shown
from settings.wandb_env import visible_gpus

STEP_KEYS = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "step_ms": "perf/step_ms",
    "tokens_per_s": "perf/tokens_per_s",
    "mfu": "perf/mfu",
}
EVAL_KEYS = {
    "val_loss": "val/loss",
    "val_bpb": "val/bpb",
    "val_ppl": "val/perplexity",
    "core": "core/core",
    "core_partial": "core/partial",
    "core_margin": "core/margin",
    "core_tasks": "core/tasks",
}
EVAL_MAPS = {
    "val_loss_by_source": "val/loss/",
    "val_bpb_by_source": "val/bpb/",
    "core_centred": "core/",
}

POLL_S = 1.0  # between two looks at the record, and at the GPUs
PAUSES_S = (5, 300)  # after the first try that fails and, doubled from there, at most
INIT_S = 60  # for one try
REACH_S = 10  # until W&B counts as out of reach: it is said then, and a run that ends does not wait for it
UPLOAD_S = 600  # for the rest of the upload, once the trainer is gone
BEHIND_S = 1  # at most between a row and its place in W&B's own file


# ---------------------------------------------------------------------------------------------------
# From the record to rows
# ---------------------------------------------------------------------------------------------------


class Tail:
    """The complete lines that have been added to a file."""

    def __init__(self, path: Path):
        self.path, self.position = path, 0

    def records(self) -> Iterator[dict[str, Any]]:
        """What is new. A last line without its end is not complete yet; one that is no record is left out."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self.position += len(line)
                    try:
                        entry = json.loads(line)
                    except ValueError:
                        continue
                    if isinstance(entry, dict) and entry.get("schema") == reader.SCHEMA:
                        yield entry
        except FileNotFoundError:
            return


class Rows:
    """Puts the records of one step together. `after` is the last step that W&B has."""

    def __init__(self, c: Config, after: int):
        self.every, self.eval_every, self.last_step, self.after = (
            c.log_every,
            c.eval_every,
            c.last_step,
            after,
        )
        self.step, self.values, self.time = (
            0,
            dict[str, float](),
            0.0,
        )  # the row that may still grow
        self.first = False  # whether the next step is the first of an attempt
        self.outcome = "killed"  # or what the record gave as the reason of its end

    def feed(self, entry: Mapping[str, Any]) -> Iterator[tuple[int, float, dict[str, float]]]:
        """Take one record in order; (step, time, values) of a row that is complete by it."""
        event, step = entry["event"], entry["step"]
        if event == "end":
            self.outcome = entry.get("reason", "done")
        elif event in ("start", "resume", "rollback"):
            self.first, self.outcome = True, "killed"
            if step < self.step:  # that step will come again, perhaps with an evaluation
                self.values = {}
        elif event in ("step", "eval"):
            if step != self.step:
                yield from self.complete()
                self.step = step
            self.time = entry["time"]
            if event == "eval":
                self.values |= numbers(entry, EVAL_KEYS)
                for key, prefix in EVAL_MAPS.items():
                    of_each = entry.get(key) or {}
                    self.values |= numbers(of_each, {name: prefix + name for name in of_each})
            elif step % self.every == 0 or self.first or step == self.last_step:
                self.values |= numbers(entry, STEP_KEYS)
                if (
                    loss := entry.get("loss")
                ) is not None and loss < 700:  # exp() has no greater ones
                    self.values["train/perplexity"] = math.exp(loss)
            self.first = self.first and event == "eval"

    def complete(self) -> Iterator[tuple[int, float, dict[str, float]]]:
        """The row in the making, which nothing will be added to."""
        if self.values and self.step > self.after:
            yield self.step, self.time, self.values
            self.after = self.step
        self.values = {}

    def rest(self) -> Iterator[tuple[int, float, dict[str, float]]]:
        """The last row, unless a resumed run has yet to evaluate that step: W&B takes a step once."""
        due = self.step == self.last_step or (self.eval_every and self.step % self.eval_every == 0)
        if self.outcome == "done" or not due or "val/loss" in self.values:
            yield from self.complete()


def numbers(entry: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, float]:
    """W&B's key -> value; what is not known is left out."""
    return {there: entry[here] for here, there in keys.items() if entry.get(here) is not None}


# ---------------------------------------------------------------------------------------------------
# GPUs
# ---------------------------------------------------------------------------------------------------


class Gpus:
    """Utilisation and power of the GPUs that this run may use, from the driver. Has none where there is no NVML."""

    def __init__(self, count: int | None):
        self.handles: list[Any] = []
        self.samples: list[
            tuple[float, float, float]
        ] = []  # (time, per cent, watts), means over the GPUs
        try:
            import pynvml
        except ImportError:
            return
        self.nvml = pynvml
        try:
            pynvml.nvmlInit()
            names = visible_gpus()
            for name in range(pynvml.nvmlDeviceGetCount()) if names is None else names:
                by_index = str(name).isdecimal()
                self.handles.append(
                    pynvml.nvmlDeviceGetHandleByIndex(int(name))
                    if by_index
                    else pynvml.nvmlDeviceGetHandleByUUID(name)
                )
        except pynvml.NVMLError:  # also: no driver
            self.handles = []
        self.handles = self.handles[:count]

    def sample(self) -> None:
        if not self.handles:
            return
        try:
            util = [self.nvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in self.handles]
            watts = [self.nvml.nvmlDeviceGetPowerUsage(handle) / 1000 for handle in self.handles]
        except self.nvml.NVMLError:
            return
        self.samples.append((time.time(), sum(util) / len(util), sum(watts) / len(watts)))

    def until(self, moment: float) -> dict[str, float]:
        """Means over the samples since the last call up to a row's moment; {} where nothing was sampled."""
        taken = [sample for sample in self.samples if sample[0] <= moment]
        self.samples = self.samples[len(taken) :][-3600:]
        if not taken:
            return {}
        return {
            "gpu/util": sum(s[1] for s in taken) / len(taken),
            "gpu/power_w": sum(s[2] for s in taken) / len(taken),
        }


# ---------------------------------------------------------------------------------------------------
# The process
# ---------------------------------------------------------------------------------------------------


class Sidecar:
    """Mirrors one run; `orders` and `voice` are file descriptors of the trainer's pipes.

    reach_s: how long W&B may take to be reached where there is no trainer any more.
    """

    def __init__(self, c: Config, orders: int, voice: int, reach_s: float = REACH_S):
        self.config, self.orders, self.voice, self.reach_s = c, orders, voice, reach_s
        self.paths = RunPaths.of_node(c, ROOT)
        self.gone = threading.Event()  # the trainer is
        self.reached = threading.Event()  # W&B is
        self.obstacle = "was not reached"
        self.trying = threading.Event()  # the package is loaded, which takes a busy machine long
        self.began = time.monotonic()
        self.said: set[str] = set()
        threading.Thread(target=self.watch, daemon=True).start()
        threading.Thread(target=self.remark, daemon=True).start()

    def say(self, text: str) -> None:
        """A line for the user, once; and for the log."""
        if text in self.said:
            return
        self.said.add(text)
        line = f"W&B: {' '.join(text.split())}\n"
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")
        sys.stderr.flush()
        with contextlib.suppress(OSError):  # the trainer may be gone; the log has it
            os.write(self.voice, line.encode())

    def watch(self) -> None:
        """In a thread: wait for the trainer's end, and from then on not longer than is reasonable."""
        while os.read(self.orders, 1):
            pass
        self.gone.set()
        if not self.reached.wait(max(0.5, self.reach_s - (time.monotonic() - self.began))):
            self.give_up(self.obstacle)
        time.sleep(UPLOAD_S)
        self.give_up("did not take everything in time")

    def remark(self) -> None:
        """In a thread: say that W&B is slow to answer, while a first try may still take a while."""
        self.trying.wait()
        if not self.reached.wait(REACH_S) and not self.said and not self.gone.is_set():
            self.say("no answer yet; the run goes on, and all of it is uploaded once there is one")

    def give_up(self, why: str) -> None:
        self.say(f"{why}; to upload the run later: make mirror RUN_NAME={self.config.run_name}")
        os._exit(1)  # a thread may be deep in W&B; its own process ends with this one

    def run(self) -> int:
        with open(self.paths.wandb_lock, "a", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.obstacle = "another process still mirrors this run"
                self.say(f"{self.obstacle}; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            self.obstacle = "was not reached"
            lock.truncate(0)
            lock.write(f"pid {os.getpid()}")
            lock.flush()
            self.state = self.read_state()
            self.write_state()  # the id, before anybody else knows it
            try:
                import wandb
            except ImportError as error:
                self.say(
                    f"the package wandb cannot be imported ({error}); make setup installs it. "
                    "The run goes on without"
                )
                return 1
            self.trying.set()
            return self.mirror(self.connect(wandb))

    def read_state(self) -> dict[str, Any]:
        """wandb.json, or what it begins with. A step counts only where it was given to the same project."""
        c = self.config
        target = {"mode": c.wandb_mode, "project": c.wandb_project, "entity": c.wandb_entity}
        try:
            state = dict(json.loads(self.paths.wandb_state.read_text()))
        except (FileNotFoundError, ValueError):
            state = {"schema": 1, "id": secrets.token_hex(4), "step": 0}
        if any(state.get(name, target[name]) != target[name] for name in ("project", "entity")):
            state |= {"step": 0, "url": None}
        url = state.get("url") if c.wandb_mode == "online" else None
        return state | target | {"url": url}

    def write_state(self, **facts: Any) -> None:
        self.state |= facts
        temporary = self.paths.wandb_state.with_name(f"wandb.json.tmp-{os.getpid()}")
        temporary.write_text(json.dumps(self.state, indent=1) + "\n")
        os.replace(temporary, self.paths.wandb_state)

    def connect(self, wandb: ModuleType) -> Any:
        """The run at W&B, tried for as long as the trainer lives."""
        c = self.config
        online = c.wandb_mode == "online"
        settings = wandb.Settings(
            root_dir=str(self.paths.folder),
            use_dot_wandb=False,
            symlink=False,
            console="off",
            show_info=False,
            show_colors=False,
            init_timeout=INIT_S,
            x_transaction_log_flush_interval=BEHIND_S,
            disable_code=True,
            disable_git=True,
            save_code=False,
            disable_job_creation=True,
            program="",
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        pause, most = PAUSES_S
        while True:
            try:
                run = wandb.init(
                    project=c.wandb_project,
                    entity=c.wandb_entity or None,
                    id=self.state["id"],
                    name=c.run_name,
                    resume="allow" if online else None,
                    mode=c.wandb_mode,
                    config=c.stored(),
                    allow_val_change=True,
                    settings=settings,
                )
                break
            except (wandb.errors.Error, OSError) as error:
                if isinstance(error, wandb.errors.AuthenticationError):
                    self.give_up(f"WANDB_API_KEY is no key ({error})")
                doubt = "; is WANDB_API_KEY right?" if "401" in str(error) else ""
                self.say(
                    f"cannot be reached ({error}){doubt} Trying again now and then; the run goes on"
                )
            if self.gone.wait(pause):
                self.give_up(self.obstacle)
            pause = min(2 * pause, most)
        self.reached.set()
        if online:
            self.write_state(url=run.url, step=run.starting_step - 1 if run.starting_step else 0)
            self.say(str(run.url))
        else:
            self.say(
                f"offline, in {shown(self.paths.wandb)}; to upload it: {sync_command(self.paths)}"
            )
        return run

    def mirror(self, run: Any) -> int:
        """Follow the record until the trainer is gone and all is read."""
        rows, tail, gpus = (
            Rows(self.config, self.state["step"]),
            Tail(self.paths.metrics),
            Gpus(self.config.nproc),
        )

        def log(complete: Iterator[tuple[int, float, dict[str, float]]]) -> None:
            for step, moment, values in complete:
                run.log(values | gpus.until(moment) | {"_timestamp": moment}, step=step)

        while True:
            last = (
                self.gone.is_set()
            )  # asked before reading: all that the trainer wrote is then there
            gpus.sample()
            before = rows.after
            for entry in tail.records():
                log(rows.feed(entry))
            if last:
                log(rows.rest())
            if rows.after != before:
                self.write_state(step=rows.after)
            if last:
                break
            self.gone.wait(POLL_S)
        if rows.outcome == "stopped":
            run.mark_preempting()
        run.finish(exit_code={"done": 0, "stopped": 75}.get(rows.outcome, 1))
        return 0


def main() -> int:
    os.nice(10)  # training comes first
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    orders, voice = os.dup(0), os.dup(1)  # W&B and its process get neither
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # alone: no end of a run waits for it, and there is time for a whole try
    sidecar = Sidecar(
        Config.load(), orders, voice, INIT_S if sys.argv[1:] == ["alone"] else REACH_S
    )
    try:
        return sidecar.run()
    except (
        Exception
    ) as error:  # W&B's own process may die, its disk be full: what is left is to say so
        traceback.print_exc()
        sidecar.give_up(
            f"failed ({type(error).__name__} {error}), see {shown(sidecar.paths.wandb_log)}"
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
