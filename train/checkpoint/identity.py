"""Which run a checkpoint is of: an id in config.json and in each manifest, and the settings that shape training.

The id is random and made once per run, so a copy of the whole folder is still that run. Each site
of SYNC=diloco has a folder of its own, with an id of its own.
"""

import dataclasses
import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from record.run_paths import list_checkpoints, name_checkpoint
from settings.config import SETTINGS, Config
from settings.declare import FREE, format_value, read_section
from settings.resume import compare_with_stored
from settings.run import Machine
from train.checkpoint.manifest import CheckpointError, hash_content, load_manifest
from train.distributed.world import World, from_first

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
        adopted: hashes of the manifests without an identity that are this run's: an earlier version
            wrote them. None until they have been looked for.
    """

    id: str
    settings: dict[str, Any]
    adopted: list[str] | None = None

    @classmethod
    def of(cls, before: Mapping[str, Any], config: Config) -> "Identity":
        """Return that in the config.json of earlier attempts, or a new one. Called by all ranks."""
        values = config.values()
        settings = {name: values[name] for name in SHAPES_A_RUN}
        stored = before.get("identity")
        if stored:
            # Of an edited file, no checkpoint is accepted: that names it.
            return cls(str(stored.get("id")), settings, stored.get("adopted", []))
        return cls(from_first(uuid.uuid4().hex), settings)

    def stored(self) -> dict[str, Any]:
        """Return what config.json has of it."""
        return {"id": self.id, "adopted": self.adopted}

    def of_checkpoint(self) -> dict[str, Any]:
        """Return what a manifest has of it."""
        return {"id": self.id, "settings": self.settings}

    def check(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        """Raise CheckpointError if a checkpoint is of another run."""
        theirs = manifest.get("run")
        if theirs is None:
            self.check_without_identity(folder, manifest)
            return
        refusals, changes = compare_with_stored(theirs["settings"], self.settings)
        if theirs["id"] == self.id:
            if refusals:
                raise CheckpointError(f"{folder}: does not fit this run. {' '.join(refusals)}")
            return
        if self.adopted is None and not refusals and not changes:
            self.id = theirs["id"]  # an earlier version has written config.json anew, without it
            return
        raise other_run(
            folder, f"of another run{describe_difference(theirs['settings'], self.settings)}"
        )

    def check_without_identity(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        if self.adopted is None:
            log.info(
                "%s: was written by an earlier version, which did not say of which run it is. It is "
                "taken as this run's; new checkpoints name their run",
                folder,
            )
        elif hash_content(dict(manifest)) not in self.adopted:
            raise other_run(
                folder, "of another run or edited: it does not name its run, as this run's do"
            )

    def adopt(self, root: Path, world: World) -> None:
        """Take all checkpoints that have no identity for this run's, once. Called by all ranks."""
        if self.adopted is None:
            self.adopted = from_first(hash_unnamed(root) if world.is_first else [])


def check_identity(
    before: Mapping[str, Any], config: Config, folder: Path, manifest: Mapping[str, Any]
) -> None:
    """Raise CheckpointError if a checkpoint is of another run than its config.json.

    Args:
        before: config.json of the run. One that an earlier version wrote has no identity to compare.
        config: the run's settings.
    """
    if before.get("identity"):
        Identity.of(before, config).check(folder, manifest)


def hash_unnamed(root: Path) -> list[str]:
    """Return the hashes of the manifests that do not name their run."""
    hashes = []
    for step in list_checkpoints(root):
        try:
            manifest = load_manifest(root / name_checkpoint(step))
        except CheckpointError:
            continue
        if "run" not in manifest:
            hashes.append(hash_content(manifest))
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
