"""Weights & Biases as a tracker. processes.py starts it.

wandb.json keeps the id of the run, so that a restart continues it, and the last position that W&B has. W&B wants its
own step to grow with each row: that is the position (follow.py); charts are drawn over `step`. Utilization and power of
GPUs are W&B's own system metrics.
"""

import contextlib
import json
import secrets
from typing import Any, cast

from record.durable import write_whole
from record.trackers.follow import Row, Tracker
from record.trackers.processes import BIN
from settings.json_file import read_object
from settings.resolve import show_path
from settings.visible_gpus import is_gpu_visible

INIT_S = 60  # for one try to connect
FLUSH_S = 1  # until a row is in W&B's own file
EXIT_CODES = {"done": 0, "stopped": 75}


def is_state(stored: dict[str, Any]) -> bool:
    """Tell whether an attempt before wrote this; the first edition, and others, wrote no `sent`."""
    run_id = stored.get("id")
    return isinstance(run_id, str) and run_id.isalnum() and isinstance(stored.get("sent"), int)


class WandbTracker(Tracker):
    """A run at W&B, online or in files."""

    name = "wandb"

    def open(self) -> int:
        self.state: dict[str, Any] = {"schema": 1, "id": secrets.token_hex(4), "sent": -1}
        with contextlib.suppress(OSError, ValueError):
            stored = read_object(self.paths.wandb_state)
            if is_state(stored):
                self.state |= stored
        self.write_state(where=None)  # the id, before W&B knows it
        self.there = self.connect()
        if self.config.wandb_mode == "offline":
            files = show_path(self.paths.wandb)
            command = f"{BIN}/wandb sync {files}/offline-run-*"
            self.write_state(where=f"offline, in {files}. To upload it: {command}")
        else:
            self.write_state(where=self.there.url, sent=self.there.starting_step - 1)
        self.say(self.state["where"])
        return int(self.state["sent"])

    def write_state(self, **changes: Any) -> None:
        self.state |= changes
        write_whole(self.paths.wandb_state, json.dumps(self.state, indent=1).encode())

    def connect(self) -> Any:
        """Start or continue the run at W&B, and return it. Raises OSError where W&B cannot be reached."""
        import wandb

        c = self.config
        settings = wandb.Settings(
            root_dir=str(self.paths.folder),
            use_dot_wandb=False,
            symlink=False,
            console="off",
            init_timeout=INIT_S,
            x_transaction_log_flush_interval=FLUSH_S,
            disable_code=True,
            disable_git=True,
            program="",
            x_disable_meta=True,
            x_save_requirements=False,
            x_disable_machine_info=not is_gpu_visible(),  # which are system metrics too
        )
        try:
            there = wandb.init(
                project=c.wandb_project,
                entity=c.wandb_entity or None,
                id=self.state["id"],
                name=c.run_name,
                resume="allow" if c.wandb_mode == "online" else None,
                mode=cast(Any, c.wandb_mode),  # wandb declares its modes one by one
                config=c.stored(),
                allow_val_change=True,
                settings=settings,
            )
        except wandb.errors.Error as error:
            wandb.teardown()  # which still has the run, and would refuse to start it again
            raise OSError(str(error)) from error
        there.define_metric("*", step_metric="step")
        return there

    def send(self, rows: list[Row]) -> None:
        for row in rows:
            values = row.values | {"step": row.step, "_timestamp": row.time}
            self.there.log(values, step=row.position, commit=True)
        self.write_state(sent=rows[-1].position)

    def close(self) -> None:
        if self.outcome == "stopped":
            self.there.mark_preempting()
        self.there.finish(exit_code=EXIT_CODES.get(self.outcome, 1))


if __name__ == "__main__":
    WandbTracker().run()
