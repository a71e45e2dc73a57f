"""Which run a checkpoint is of: an id in config.json and in each manifest, and the settings that shape training.

The id is random and made once per run, so a copy of the whole folder is still that run. Each attempt
has an id, too. config.json lists those of the run before its first step, and a checkpoint names the one
that wrote it. Of a copy that went its own way, a checkpoint is refused: this run has made no such attempt.

Each site of SYNC=diloco has a folder of its own, with ids of its own.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from record.run_paths import list_checkpoints, name_checkpoint
from settings.config import SETTINGS, Config
from settings.declare import FREE, format_value, read_section
from settings.resume import compare_with_stored
from settings.run import Machine
from train.checkpoint.manifest import CheckpointError, load_manifest

log = logging.getLogger(__name__)

# A run may continue on another machine.
MACHINE = read_section(Machine)
SHAPES_A_RUN = [
    name for name, declared in SETTINGS.items() if declared.resume != FREE and name not in MACHINE
]


@dataclasses.dataclass
class Identity:
    """The identity of a run, the same on all ranks.

    Attributes:
        attempts: ids of the attempts at this run, this one last.
        adopted: hashes of the manifests without an identity that are this run's, which began
            before there were identities. None until they have been looked for.
    """

    id: str
    settings: dict[str, Any]
    attempts: list[str]
    adopted: list[str] | None = None

    @classmethod
    def of(cls, before: Mapping[str, Any], config: Config, new_id: str = "") -> "Identity":
        """Return the identity in the config.json of earlier attempts; without one, that with `new_id`.

        new_id: of the attempt that begins; "" for a command that only reads.
        """
        values = config.values()
        settings = {name: values[name] for name in SHAPES_A_RUN}
        return cls.read(before, settings, new_id)

    @classmethod
    def read(
        cls, before: Mapping[str, Any], settings: dict[str, Any], new_id: str = ""
    ) -> "Identity":
        """Return the identity that `of` returns, of these settings."""
        stored = before.get("identity") or {"id": new_id, "adopted": None}
        attempts = list(stored.get("attempts", []))
        if new_id:
            attempts.append(new_id)
        # Of an edited file, no checkpoint is accepted: that names it.
        return cls(str(stored.get("id")), settings, attempts, stored.get("adopted", []))

    def stored(self) -> dict[str, Any]:
        """Return what config.json has of it."""
        return {"id": self.id, "attempts": self.attempts, "adopted": self.adopted}

    def of_checkpoint(self) -> dict[str, Any]:
        """Return what a manifest has of it."""
        return {"id": self.id, "attempt": self.attempts[-1], "settings": self.settings}

    def is_mine(self, manifest: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint is of this run: an attempt at it wrote it, or it was adopted."""
        theirs = manifest.get("run")
        if theirs is None:
            return self.adopted is None or manifest["hash"] in self.adopted
        return theirs["id"] == self.id and theirs.get("attempt") in self.attempts

    def check(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        """Raise CheckpointError if a checkpoint is of another run, or of a copy of this one."""
        theirs = manifest.get("run")
        if theirs is None:
            if not self.is_mine(manifest):
                raise other_run(
                    folder, "of another run or edited: it does not name its run, as this run's do"
                )
            return
        if theirs["id"] != self.id:
            what = f"of another run{describe_difference(theirs['settings'], self.settings)}"
            if self.adopted is None:
                what += " (or config.json lost its `identity`: then restore that file from a copy)"
            raise other_run(folder, what)
        if not self.is_mine(manifest):
            difference = describe_difference(theirs["settings"], self.settings)
            raise other_run(
                folder,
                f"of a copy of this run{difference}: the attempt that wrote it is not in config.json "
                "(or that file is an earlier copy: then restore the last one)",
            )
        refusals, _ = compare_with_stored(theirs["settings"], self.settings)
        if refusals:
            raise CheckpointError(f"{folder}: does not fit this run. {' '.join(refusals)}")


def check_identity(
    before: Mapping[str, Any], config: Config, folder: Path, manifest: Mapping[str, Any]
) -> None:
    """Raise CheckpointError if a checkpoint is of another run than `before`, the run's config.json."""
    Identity.of(before, config).check(folder, manifest)


def hash_unnamed(root: Path) -> list[str]:
    """Return the hashes of the manifests that do not name their run, and log that they are this run's."""
    hashes = []
    for step in list_checkpoints(root):
        with contextlib.suppress(CheckpointError):
            manifest = load_manifest(root / name_checkpoint(step))
            if "run" not in manifest:
                hashes.append(manifest["hash"])
    if hashes:
        log.info(
            "%s: checkpoints that do not say of which run they are (%d) are taken as this run's; new "
            "ones name their run",
            root,
            len(hashes),
        )
    return hashes


def describe_difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Say which settings differ: `, with SEED=1 (here 2)`."""
    differing = [
        f"{name}={format_value(theirs[name])} (here {format_value(ours[name])})"
        for name in SHAPES_A_RUN
        if name in theirs and theirs[name] != ours[name]
    ]
    return f", with {', '.join(differing)}" if differing else ""


def other_run(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: is {what}. Move it out of this folder and run the same command. To start a new "
        "run from its weights, run make export for the run that it is of, and set INIT_FROM to that "
        "export with another RUN_NAME."
    )
