"""A disk that loses, when the power fails, whatever nobody has synced, and that can be full or slow."""

import os
import threading
from pathlib import Path


class Disk:
    """What of a folder would be there after a power failure."""

    def __init__(self, root, choose):
        self.root = root
        self.choose = choose
        # inode -> what was synced: a file's content, or a folder's names and their inodes
        self.synced: dict[int, bytes | dict[str, int]] = {}
        self.image: dict[int, bytes | dict[str, int]] | None = None  # when the power failed
        self.open: list[int] = []  # keeps inodes from being used again
        self.fails_in = self.full_in = 10**9  # syncs
        self.may_write = threading.Event()  # a save waits for it, but not for long
        self.may_write.set()

    def install(self, patch):
        usage = type("Usage", (), {"free": 2**40})
        patch.setattr(os, "fsync", self.fsync)
        patch.setattr("shutil.disk_usage", lambda _: (self.may_write.wait(0.1), usage)[1])

    def fsync(self, descriptor):
        self.full_in -= 1
        if self.full_in < 0:
            raise OSError(28, "No space left on device")
        if self.fails_in == 0:
            self.image = dict(self.synced)
        self.fails_in -= 1
        path = Path(f"/proc/self/fd/{descriptor}")
        self.open.append(os.open(path, os.O_RDONLY))
        self.synced[os.fstat(descriptor).st_ino] = (
            {name: (path / name).stat().st_ino for name in os.listdir(path)}
            if path.is_dir()
            else path.read_bytes()
        )

    def change(self, path, content):
        """Damage a file, as disks do."""
        path.write_bytes(content)
        self.synced[path.stat().st_ino] = content

    def lose_power(self, into):
        """Make the folder as the disk has it: of a file that was not synced, a part of its content at most."""
        synced = self.image or self.synced
        paths = {path.stat().st_ino: path for path in [self.root, *self.root.rglob("*")]}

        def restore(inode, path):
            content = synced.get(inode)
            cached = paths.get(inode, path)
            if isinstance(content, bytes):
                path.write_bytes(content)
            elif cached.is_file():
                torn = cached.read_bytes()
                path.write_bytes(torn[: self.choose.randrange(len(torn))])
            else:
                path.mkdir()
                for name, child in (content or {}).items():
                    restore(child, path / name)

        restore(self.root.stat().st_ino, into)
        self.close()
        self.__init__(into, self.choose)  # type: ignore[misc]
        for path in [into, *into.rglob("*")]:  # what came back is on the disk
            descriptor = os.open(path, os.O_RDONLY)
            self.fsync(descriptor)
            os.close(descriptor)

    def close(self):
        for descriptor in self.open:
            os.close(descriptor)
