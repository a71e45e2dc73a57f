"""What a run writes: how much, on which disk, whether that has the room, and how long a save takes. Computed.

checkpoints    weights and moments in float32, those that are kept and the one being written; under SYNC=diloco
               also what sites agreed on last and the momentum of the outer step, and each site writes its own
shards         of what the mixture takes of each source, or DATA_CACHE_GB while they are streamed
downloads      of sources on the hub, while shards are made
"""

import dataclasses
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from hardware import model_size
from plan.data_wanted import declared_tokens, sealed
from plan.measured import Probe
from record.run_paths import RunPaths
from settings import ROOT
from settings.config import Config
from train.data import data_paths
from train.data.sources.source import Source

if TYPE_CHECKING:
    from plan.run import Run

NUMBER_BYTES = 4  # of a weight or a moment: float32, whatever DTYPE is
TENSOR_BYTES = (
    1860  # that torch.distributed.checkpoint adds to each tensor, measured with torch 2.13
)
DOWNLOAD_BYTES = (
    5e9  # of a source on the hub, at most: the file that is read and the next, of about 2 GB each
)
TEXT_BYTES = 8  # of a token, at most, in a file as it is downloaded; as a rule 2 to 5
MB_PER_S = 500.0  # at which one server's SSD took files that were flushed behind; where nothing is measured


# ---------------------------------------------------------------------------------------------------
# How much
# ---------------------------------------------------------------------------------------------------


def checkpoint_bytes(c: Config) -> float:
    """Of a checkpoint as train/checkpoint/checkpoint.py writes it: AdamW keeps two moments and a count of each weight, Muon one
    of the matrices inside blocks; SYNC=diloco adds what sites agreed on last, and a momentum of it."""
    p = model_size.parameters(c)
    inside = p.hidden if c.optimizer == "muon" else 0
    matrices, norms = 7 * c.n_layer, (2 + 2 * c.qk_norm) * c.n_layer + 1
    weights = matrices + norms + (1 if c.tie_embeddings else 2)
    outer = 2 if c.sync == "diloco" else 0
    tensors = (4 + outer) * weights - 2 * (matrices if c.optimizer == "muon" else 0)
    return float(NUMBER_BYTES * ((3 + outer) * p.total - inside) + TENSOR_BYTES * tensors)


def disk_of_checkpoints(c: Config, step_s: float | None = None) -> float:
    """At most, of one site: those that are kept and the one that is being written, or all that the run writes."""
    if c.save_every == 0:
        return 0.0
    kept_for_ever = c.last_step // c.keep_every if c.keep_every else 0
    return min(c.keep_last + 1 + kept_for_ever, most_saves(c, step_s)) * checkpoint_bytes(c)


def most_saves(c: Config, step_s: float | None) -> int:
    """At most so many checkpoints are written: by SAVE_EVERY, SAVE_MINUTES and KEEP_BEST, and at the end. step_s:
    seconds of a step; where that is not known, one at each step."""
    if step_s is None:
        return c.last_step
    saves = 1 + int(c.last_step * step_s / (60 * c.save_minutes))
    if c.save_every:
        saves += c.last_step // c.save_every
    if c.keep_best:
        saves += c.last_step // c.eval_every
    return min(saves, c.last_step)


def token_bytes(c: Config) -> int:
    """Of a token in a shard."""
    return data_paths.token_bytes(c.vocab_size)


def sources(c: Config) -> list[Source]:
    """Of the mixture. Raises CorpusError."""
    return [data_paths.source_of(c, name) for name in c.mixture]


def tokens_to_make(c: Config, s: Source) -> float | None:
    """Training tokens that are made of a source; None where nobody knows how many it has, and all are wanted."""
    there = declared_tokens(c, s)
    made = min(math.inf if there is None else there, data_paths.token_limit(c, s))
    return None if math.isinf(made) else made


def disk_of_shards(c: Config) -> float:
    """At most. Of a source whose size is not known nothing is counted: unknown(c) names it."""
    made = [
        token_bytes(c) * tokens for s in sources(c) if (tokens := tokens_to_make(c, s)) is not None
    ]
    if c.data_stream == "0" or not streams(c):
        return sum(made)
    # While streaming the cache is kept to, but for two groups of each source, which are there whatever it takes.
    least = 2 * data_paths.GROUP_SHARDS * data_paths.SHARD_TOKENS * token_bytes(c)
    return min(sum(made), max(c.data_cache_gb * 1e9, sum(min(least, size) for size in made)))


def streams(c: Config) -> bool:
    """Whether shards may be made while the run trains."""
    return c.data_stream == "1" or (
        c.data_stream == "auto" and any(s.kind == "hub" for s in sources(c))
    )


def unknown(c: Config) -> list[str]:
    """Sources of which nobody knows how large their shards will be."""
    return [s.name for s in sources(c) if tokens_to_make(c, s) is None]


def disk_of_downloads(c: Config) -> float:
    """While shards are made, at most."""
    return sum(
        min(DOWNLOAD_BYTES, math.inf if s.tokens is None else TEXT_BYTES * s.tokens)
        for s in sources(c)
        if s.kind == "hub"
    )


def disk(c: Config, step_s: float | None = None) -> dict[str, float]:
    """Part -> bytes when the run takes most. step_s: seconds of a step, if known. Raises CorpusError."""
    return {
        "checkpoints": disk_of_checkpoints(c, step_s),
        "shards": disk_of_shards(c),
        "downloads": disk_of_downloads(c),
    }


def disk_of(run: "Run", step_s: float | None) -> dict[str, float]:
    """Return the bytes by part when a run of either kind takes most. Raises CorpusError."""
    config = run.config
    if not run.is_finetuning:
        return disk(config, step_s)
    kept_last = config.keep_last + 1 if config.save_every != 0 else 0
    kept_forever = config.last_step // config.keep_every if kept_last and config.keep_every else 0
    shape = run.model.shape
    return {
        "checkpoints": kept_last * run.checkpoint_bytes + kept_forever * run.model.full_bytes,
        "the export": float(shape.stored * shape.total),
    }


# ---------------------------------------------------------------------------------------------------
# Where
# ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """A file system of this machine that the run writes to. settings: RUNS_DIR, DATA_DIR or both; needs: part -> bytes
    that are still to be written there; free: bytes."""

    settings: tuple[str, ...]
    folder: Path
    needs: dict[str, float]
    free: float

    @property
    def missing(self) -> float:
        """Bytes that will not fit."""
        return max(0.0, sum(self.needs.values()) - self.free)


def at_pace(c: Config, place: Place, step_s: float | None) -> Place:
    """The same with no more checkpoints than are written where a step takes this long."""
    spared = disk_of_checkpoints(c) - disk_of_checkpoints(c, step_s)
    needs = place.needs
    if "checkpoints" in needs:
        needs = needs | {"checkpoints": max(0.0, needs["checkpoints"] - spared)}
    return dataclasses.replace(place, needs=needs)


class FolderError(Exception):
    """RUNS_DIR or DATA_DIR is no folder, or cannot be looked into; in a sentence."""


def places(c: Config) -> list[Place]:
    """Each file system once, with what is there of the run already taken off. Raises CorpusError, FolderError."""
    folders = {
        "RUNS_DIR": existing("RUNS_DIR", RunPaths.of(c.runs_dir, c.run_name, ROOT).folder),
        "DATA_DIR": existing("DATA_DIR", data_paths.data_dir(c)),
    }
    runs = RunPaths.of(c.runs_dir, c.run_name, ROOT)
    parts, there = disk(c), [sealed(c, s) for s in sources(c)]
    ready = all(shards and shards.whole for shards in there)
    needs = {
        "RUNS_DIR": {"checkpoints": parts["checkpoints"] - saved_bytes(runs)},
        "DATA_DIR": {
            "shards": 0.0
            if ready
            else parts["shards"] - sum(shards.size for shards in there if shards),
            "downloads": 0.0 if ready else parts["downloads"],
        },
    }
    disks: list[Place] = []
    for device in dict.fromkeys(folder.stat().st_dev for folder in folders.values()):
        on_device = tuple(
            name for name, folder in folders.items() if folder.stat().st_dev == device
        )
        disks.append(
            Place(
                on_device,
                folders[on_device[0]],
                {part: max(0.0, size) for name in on_device for part, size in needs[name].items()},
                float(shutil.disk_usage(folders[on_device[0]]).free),
            )
        )
    return disks


def existing(name: str, path: Path) -> Path:
    """The folder that a setting names, or the nearest above it that there is. Raises FolderError."""
    try:
        folder = next(each for each in (path, *path.parents) if each.exists())
        if folder.is_dir():
            return folder
        reason = f"{folder} is no folder"
    except OSError as error:
        reason = str(error.strerror)
    raise FolderError(
        f"{name}: {path} cannot be read ({reason}). Choose another {name}, or fix its permissions"
    )


def saved_bytes(runs: RunPaths) -> float:
    """Of the checkpoints that there are."""
    try:
        return size_of(runs.checkpoints.glob("step_*/*"))
    except OSError as error:
        raise FolderError(
            f"RUNS_DIR: {runs.checkpoints} cannot be read ({error.strerror}). Choose another "
            "RUNS_DIR, or fix its permissions"
        ) from None


def size_of(files: Iterable[Path]) -> float:
    return float(sum(file.stat().st_size for file in files if file.is_file()))


# ---------------------------------------------------------------------------------------------------
# How fast
# ---------------------------------------------------------------------------------------------------


def write_mb_s(probe: Probe | None) -> tuple[float, str]:
    """MB/s at which a checkpoint is written, and where that is from, in words."""
    if probe and probe.disk_mb_s:
        return probe.disk_mb_s, "measured by make doctor PROBE=1"
    return MB_PER_S, "assumed; make doctor PROBE=1 measures it"


def save_s(c: Config, mb_s: float) -> float:
    """Seconds to write a checkpoint at so many MB/s. Training goes on meanwhile: it waits for a copy in memory only."""
    return checkpoint_bytes(c) / (mb_s * 1e6)


def wan_save_s(c: Config) -> float | None:
    """Seconds for a checkpoint to reach a volume at another site; None where there is one site."""
    if c.sites == 1:
        return None
    return 8 * checkpoint_bytes(c) / (c.wan_gbit * 1e9) + c.wan_rtt_ms / 2000
