"""trackio as a tracker: its database in RUN/trackio/, or in TRACKIO_DIR for a page of several runs. processes.py starts it.

We write with trackio's storage class instead of `trackio.init` and `log`: those have a queue of their own, drop errors,
and keep neither the time of a record nor an id by which a row is stored once. pyproject.toml pins the version for this.
"""

import datetime
import os
import secrets
import sqlite3
from pathlib import Path

from record.trackers.follow import STEP, Row, Tracker, find_position
from record.trackers.processes import BIN
from settings.resolve import show_path


class TrackioTracker(Tracker):
    """A run in trackio's database."""

    name = "trackio"

    def open(self) -> int:
        folder = self.paths.folder / self.name
        database = os.environ.setdefault("TRACKIO_DIR", str(folder))
        from trackio.sqlite_storage import SQLiteStorage

        self.storage = SQLiteStorage
        folder.mkdir(exist_ok=True)
        # A new run of the same name has another id.
        id_path = folder / "run_id"
        if not id_path.exists():
            id_path.write_text(secrets.token_hex(8))
        self.run_id = id_path.read_text()
        self.project = self.config.wandb_project
        shown = show_path(Path(database))
        command = f"TRACKIO_DIR={shown} {BIN}/trackio show --project {self.project}"
        self.say(f"in {shown}; to look at it: {command}")
        last_step = SQLiteStorage.get_last_step(self.project, run_id=self.run_id) or 0
        return find_position(last_step, STEP) - 1  # some rows of this step may be lacking

    def send(self, rows: list[Row]) -> None:
        """Store the rows in one transaction. What has the id of a row that is there is left out."""
        times = [datetime.datetime.fromtimestamp(row.time, datetime.UTC) for row in rows]
        try:
            self.storage.bulk_log(
                self.project,
                self.config.run_name,
                [row.values for row in rows],
                [row.step for row in rows],
                [time.isoformat() for time in times],
                self.config.stored(),
                [f"{self.run_id}-{row.position}" for row in rows],
                run_id=self.run_id,
            )
        except sqlite3.Error as error:
            raise OSError(str(error)) from error


if __name__ == "__main__":
    TrackioTracker().run()
