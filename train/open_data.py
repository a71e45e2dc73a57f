"""Opens the data of a run: tokenizer, shards, the loader and the evaluator. All ranks have the same."""

import dataclasses
import hashlib
import logging
from collections.abc import Mapping

import numpy as np

from record.run_paths import RunPaths
from settings.config import Config
from train import console
from train.data import prepare
from train.data.batch import Loader
from train.data.manifest import DataError
from train.data.shards import ShardSet
from train.data.streaming.consumer import StreamingClient
from train.data.streaming.node_transfer import Relay
from train.data.tokenizer import Vocabulary
from train.distributed.world import World, all_gather_object, broadcast_object
from train.evaluate.validation import Evaluator
from train.faults.watchdog import Watchdog

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Data:
    """What training and validation read.

    Attributes:
        streaming: what makes more of it, or sends it to other nodes; None if all is there.
        fingerprint: of the order of samples and of where they come from.
    """

    vocabulary: Vocabulary
    sources: dict[str, ShardSet]
    loader: Loader
    evaluator: Evaluator
    streaming: StreamingClient | None
    fingerprint: str

    @property
    def compressed(self) -> dict[str, float]:
        """Bits per byte that general compressors need for the held-out text, by name.

        Known where they were measured, and there is one source.
        """
        first, *others = self.sources.values()
        return {} if others else first.manifest.compressed_bpb


def open_data(
    config: Config,
    paths: RunPaths,
    world: World,
    watch: Watchdog,
    stored_shards: Mapping[str, int],
    is_resumed: bool,
) -> Data:
    """Open the data of a run. If shards are still to be made or sent, there is enough of them to begin.

    stored_shards: how many validation shards of each source the run has scored so far; {} at its start.
    Raises DataError, on all ranks.
    """
    relay = Relay.begin(config, world)
    vocabulary = prepare.vocabulary(config)
    is_streamed = broadcast_object(prepare.streams(config, vocabulary))
    held_out = dict(stored_shards)
    if is_streamed and not held_out:
        held_out = dict.fromkeys(config.mixture, 1)  # however much there is by now
    streaming = None
    if is_streamed or relay:
        streaming = StreamingClient(config, paths, world.is_first, held_out, is_streamed, relay)
    if relay:
        relay.start(vocabulary)
    if streaming:

        def find_lacking() -> str:
            watch.expect("waiting for the first data", config.start_timeout_s)
            if not broadcast_object(streaming.ready):  # the producer makes the folders
                return next(iter(config.mixture))
            return prepare.not_begun(config, vocabulary, held_out)

        streaming.wait(find_lacking, log.info, "the first data")
    sources = prepare.open_sources(config, vocabulary, partial=streaming is not None)
    prepare.refuse_repetition(config, sources, is_resumed=is_resumed)
    log_sources(config, sources)
    loader = Loader(config, sources, world, vocabulary.end_of_text)
    fingerprint = fingerprint_of(loader, vocabulary, sources)
    contents = hash_contents(sources, whole=streaming is None)
    refuse_other_data(all_gather_object(f"{fingerprint}-{contents}"), world)
    if not held_out:
        counts = {name: len(shards.shards["validation"]) for name, shards in sources.items()}
        held_out = broadcast_object(counts)
    lengths = padded_lengths(vocabulary, config)
    evaluator = Evaluator(config, sources, lengths, world, vocabulary.end_of_text, held_out)
    return Data(vocabulary, sources, loader, evaluator, streaming, fingerprint)


def log_sources(config: Config, sources: dict[str, ShardSet]) -> None:
    """Log how often each source will be repeated."""
    for name, shards in sources.items():
        windows = sum(shards.windows("train", config.seq_len))
        epochs = "n/a, more is being made"
        if shards.ended:
            epochs = f"{prepare.planned_epochs(config, shards, name):.2f}"
        line = f"data={name} sequences={windows} epochs={epochs}"
        log.info("%s", line, extra=console.LOG_ONLY)


def fingerprint_of(loader: Loader, vocabulary: Vocabulary, sources: dict[str, ShardSet]) -> str:
    """Hash the order of samples and where they come from; the same while shards are still being made."""
    origin = prepare.hash_origin(sources)
    return f"{loader.mixture.fingerprint}-{vocabulary.sha256[:12]}-{origin[:12]}"


def hash_contents(sources: dict[str, ShardSet], whole: bool) -> str:
    """Hash the bytes of all shards; if more are being made, of the first ones, which all ranks see."""
    contents = []
    for name, shards in sources.items():
        seals = shards.manifest.seals
        if not whole:
            seals = seals[:1]
        contents.append((name, [info.xxh3 for seal in seals for info in seal.infos()]))
    return hashlib.sha256(repr(contents).encode()).hexdigest()[:12]


def refuse_other_data(fingerprints: list[str], world: World) -> None:
    """Raise DataError unless all ranks have the same tokenizer and shards."""
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise DataError(
                f"rank {rank} on {world.hosts[rank]} has other data than rank 0 on {world.hosts[0]} "
                f"(fingerprints {fingerprint} and {fingerprints[0]}): copy DATA_DIR from one to the other, "
                "or run make data there with the same settings"
            )


def padded_lengths(vocabulary: Vocabulary, config: Config) -> np.ndarray:
    """Return the bytes that each id stands for: (VOCAB_SIZE,), 0 where the tokenizer has no entry."""
    lengths = vocabulary.byte_lengths()
    return np.pad(lengths, (0, config.vocab_size - len(lengths)))
