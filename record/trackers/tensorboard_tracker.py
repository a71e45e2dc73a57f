"""TensorBoard as a tracker: event files in RUN/tensorboard/. processes.py starts it.

Each process writes a file of its own, with one event per row. The `source_metadata` of an event has the position of its
row, so the files themselves say which row was the last, whenever a process was killed.
"""

import os
import time

from record.trackers.follow import Row, Tracker
from record.trackers.processes import BIN
from settings.resolve import show_path


class TensorBoardTracker(Tracker):
    """The event files of a run."""

    name = "tensorboard"

    def open(self) -> int:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        folder = self.paths.folder / self.name
        folder.mkdir(exist_ok=True)
        last_sent = -1
        for path in folder.glob("events.out.tfevents.*"):
            for event in EventFileLoader(str(path)).Load():  # up to where a power failure cut it
                position = event.source_metadata.writer
                if position.isdecimal():  # not of another program
                    last_sent = max(last_sent, int(position))
        stamp = int(time.time())
        self.path = folder / f"events.out.tfevents.{stamp}.{os.getpid()}"
        self.path.touch()
        shown = show_path(folder)
        command = f"{BIN}/tensorboard --logdir {show_path(folder.parent)}"
        self.say(f"in {shown}; to look at it: {command}")
        return last_sent

    def send(self, rows: list[Row]) -> None:
        """Append an event per row, or nothing where the disk is full: a torn event would hide all later ones."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        size = self.path.stat().st_size
        try:
            with open(self.path, "ab") as file:
                writer = RecordWriter(file)
                for row in rows:
                    event = Event(
                        wall_time=row.time,
                        step=row.step,
                    )
                    event.source_metadata.writer = str(row.position)
                    for name, value in row.values.items():
                        event.summary.value.add(tag=name, simple_value=value)
                    writer.write(event.SerializeToString())
        except OSError:
            os.truncate(self.path, size)
            raise


if __name__ == "__main__":
    TensorBoardTracker().run()
