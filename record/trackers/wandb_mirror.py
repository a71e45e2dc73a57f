"""Weights & Biases as a tracker. mirror.py starts it.

wandb.json keeps the id of the run, so that a restart continues it, and the last position that W&B has. W&B wants its
own step to grow with each row: that is the position (follow.py); charts are drawn over `step`. Utilization and power of
GPUs are W&B's own system metrics.
"""

import contextlib
import json
import secrets
import sys
import time
from types import ModuleType
from typing import Any

from record.durable import write_whole
from record.status import sync_command
from record.trackers.follow import CORE, Row, Tracker, find_position
from settings.resolve import show_path

PAUSE_S = 30  # between two tries
INIT_S = 60  # for one try
FLUSH_S = 1  # until a row is in W&B's own file
EXIT_CODES = {"done": 0, "stopped": 75}


class WandbTracker(Tracker):
    """A run at W&B, online or in files."""

    name = "wandb"

    def open(self) -> int:
        # `step` is of an older edition: the last step that W&B has, with its evaluations in the same row.
        self.state: dict[str, Any] = {"schema": 1, "id": secrets.token_hex(4), "step": -1}
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            self.state |= json.loads(self.paths.wandb_state.read_text())
        self.state.setdefault("sent", find_position(self.state["step"], CORE))
        self.write_state(mode=self.config.wandb_mode, url=None)  # the id, before W&B knows it
        import wandb

        self.there = self.connect(wandb)
        self.there.define_metric("*", step_metric="step")
        if self.config.wandb_mode == "offline":
            command = sync_command(self.paths)
            self.say(f"offline, in {show_path(self.paths.wandb)}; to upload it: {command}")
        else:
            last = self.there.starting_step - 1
            if last <= self.state["step"]:
                last = find_position(last, CORE)
            self.write_state(url=self.there.url, sent=last)
            self.say(self.there.url)
        return int(self.state["sent"])

    def write_state(self, **changes: Any) -> None:
        self.state |= changes
        write_whole(self.paths.wandb_state, json.dumps(self.state, indent=1).encode())

    def connect(self, wandb: ModuleType) -> Any:
        """Return the run at W&B; tries for as long as the trainer lives."""
        c = self.config
        gpus = [int(index) for index in sys.argv[1:]]
        settings = wandb.Settings(
            root_dir=str(self.paths.folder),
            use_dot_wandb=False,
            symlink=False,
            console="off",
            init_timeout=INIT_S,
            x_transaction_log_flush_interval=FLUSH_S,
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            program="",
            x_disable_meta=True,
            x_save_requirements=False,
            x_disable_machine_info=not gpus,  # which are system metrics too
            x_stats_gpu_device_ids=gpus,
        )
        while True:
            try:
                return wandb.init(
                    project=c.wandb_project,
                    entity=c.wandb_entity or None,
                    id=self.state["id"],
                    name=c.run_name,
                    resume="allow" if c.wandb_mode == "online" else None,
                    mode=c.wandb_mode,
                    config=c.stored(),
                    allow_val_change=True,
                    settings=settings,
                )
            except (wandb.errors.Error, OSError) as error:
                self.say(f"cannot be reached ({error}). It tries again; the run goes on")
            time.sleep(PAUSE_S)

    def send(self, rows: list[Row]) -> None:
        for row in rows:
            values = row.values | {"step": row.step, "_timestamp": row.time}
            self.there.log(values, step=row.position, commit=True)
        self.write_state(sent=rows[-1].position)

    def close(self, outcome: str) -> None:
        if outcome == "stopped":
            self.there.mark_preempting()
        self.there.finish(exit_code=EXIT_CODES.get(outcome, 1))


if __name__ == "__main__":
    sys.exit(WandbTracker().run())
