"""What data cost: `make data` beside the tokenizer alone, the loader, the sampler, and opening very many shards.

    python -m bench.data_pipeline prepare|files|loader|many ROUNDS TOKENIZER
    python -m bench.data_pipeline alone TOKENIZER FILE...          one turn of the tokenizer, for `prepare`

Each writes JSON lines: what was measured (`part`), its rounds, and the share of the machine that went to others in
each. TOKENIZER is a tokenizer.json, or `train` for one of 32,768 entries trained on the embedded corpus.

    prepare   text of 100 MB, the standard library's in another order: the whole process of train.data.prepare, from its
              start to verified shards, and tokenizers' encode_batch on the same text in memory, in turns
    files     2,000 to 100,000 files of about 900 bytes as DATA: the same process, once each, which reads every file
              three times (to hash, to train a tokenizer of 1,000 entries, to make shards)
    loader    batches of 2^19 tokens of a 65/34/1 mixture, one thread; the files are in the page cache, and each
              page is mapped anew in each round
    many      100 billion tokens in 1,000 shards, which are holes on disk: opening them (sizes and headers, no hash),
              and finding samples near the ten billionth of the run, alone and as one of 8 processes
"""

import dataclasses
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from doctor.gpu_probe.foreign_load import Foreign, worst
from doctor.gpu_probe.messages import say
from settings import ROOT
from settings.config import Config
from train.data import tokenizer
from train.data.manifest import Manifest, Seal, ShardInfo
from train.data.shards import HEADER, HEADER_BYTES, ShardSet, write_shard
from train.data.sources.fetch import Files
from train.data.sources.pin import pin
from train.data.sources.rows import Document, documents
from train.data.sources.source import declared

PARTS = ("prepare", "files", "loader", "many")
MIX = {"web": 65, "papers": 34, "exams": 1}
TEXT_BYTES = 100_000_000
FILES = 4
BATCH = 4_000_000  # bytes of text that encode_batch is given at once
SMALL_FILES = (2_000, 8_000, 32_000, 100_000)
WORDS_OF_FILE = 120
CHUNK_BYTES = 4_000  # of lines that stay together when text is shuffled
SEQ_LEN, BATCH_TOKENS = 2048, 2**19
SHA256 = "00" * 32


# ---------------------------------------------------------------------------------------------------
# make data
# ---------------------------------------------------------------------------------------------------


def source_text(folder: Path) -> Iterator[str]:
    """The files of the standard library; where they are is noted in the folder."""
    pinned = pin(declared("python-stdlib", [ROOT / "sources"]), folder / "python-stdlib")
    for item in documents(pinned, Files(pinned, folder)):
        if isinstance(item, Document):
            yield item.text


def write_text(folder: Path, size: int) -> list[Path]:
    """About `size` bytes of Python source as jsonl: its lines in chunks, shuffled, 1 to 8 of them a document."""
    chance, chunks = random.Random(1), list[str]()
    for text in source_text(folder):
        lines, held = list[str](), 0
        for line in text.splitlines(keepends=True):
            lines.append(line)
            held += len(line)
            if held >= CHUNK_BYTES:
                chunks.append("".join(lines))
                lines, held = [], 0
    paths = [folder / f"text_{i}.jsonl" for i in range(FILES)]
    number = 0
    for path in paths:
        left = size // FILES
        with open(path, "w", encoding="utf-8") as file:
            while left > 0:
                text = "".join(chance.choices(chunks, k=chance.randint(1, 8)))
                left -= len(text.encode())
                file.write(json.dumps({"id": f"doc-{number}", "text": text}) + "\n")
                number += 1
    return paths


def alone(path: Path, files: list[str]) -> None:
    """Seconds of encode_batch on the text of the files, the reading of them not counted."""
    v = tokenizer.load(path)
    batches, held = [list[str]()], 0
    for name in files:
        with open(name, encoding="utf-8") as file:
            for line in file:
                batches[-1].append(json.loads(line)["text"])
                held += len(batches[-1][-1])
                if held >= BATCH:
                    batches.append([])
                    held = 0
    began, tokens = time.perf_counter(), 0
    for batch in batches:
        tokens += sum(map(len, v.tokenizer.encode_batch(batch, add_special_tokens=False)))
    say(
        seconds=time.perf_counter() - began,
        tokens=tokens,
        documents=sum(map(len, batches)),
        bytes=sum(len(text.encode()) for batch in batches for text in batch),
    )


def prepare(
    rounds: int, given: str, size: int = TEXT_BYTES, mix: str = "bench:1"
) -> Iterator[dict[str, Any]]:
    """`make data`, and encode_batch alone, in turns."""
    with tempfile.TemporaryDirectory(dir=ROOT / "bench") as name:
        folder = Path(name)
        (folder / "text").mkdir()
        files = write_text(folder / "text", size)
        path = folder / "tokenizer.json" if given == "train" else ROOT / given
        vocabulary = (
            tokenizer.load(path)
            if given != "train"
            else tokenizer.train(source_text(folder), 2**15, path)
        )

        def turn(number: int) -> dict[str, Any]:
            text = json.loads(run("bench.data_pipeline", "alone", str(path), *map(str, files)))
            settings = {
                "DATA_MIX": mix,
                "DATA_DIR": str(folder / f"data-{number}"),
                "TOKENIZER": str(path),
                "VOCAB_SIZE": str(max(300, vocabulary.size)),
            }
            sources = Path(settings["DATA_DIR"]) / "sources"
            sources.mkdir(parents=True)
            (sources / "bench.toml").write_text(
                f'files = ["{folder}/text/*.jsonl"]\nvalidation_fraction = 0.05\n'
            )
            began = time.perf_counter()
            run("train.data.prepare", **settings)
            seconds = time.perf_counter() - began
            shards = list(Path(settings["DATA_DIR"]).rglob("*_?????.bin"))
            tokens = (
                sum(path.stat().st_size - HEADER_BYTES for path in shards)
                // vocabulary.dtype().itemsize
            )
            return {
                "text_bytes_per_s": text["bytes"] / seconds,
                "tokens_per_s": tokens / seconds,
                "alone_bytes_per_s": text["bytes"] / text["seconds"],
                "ratio": text["seconds"] / seconds,
                "tokens": tokens,
                "alone_tokens": text["tokens"],
                "documents": text["documents"],
            }

        yield in_rounds("prepare", rounds, turn)


def files(counts: tuple[int, ...] = SMALL_FILES) -> Iterator[dict[str, Any]]:
    """Seconds that make data takes for folders of so many small files."""
    chance = random.Random(1)
    words = [f"{chance.randrange(10**6):x}" for _ in range(3000)]
    for count in counts:
        with tempfile.TemporaryDirectory(dir=ROOT / "bench") as name:
            for number in range(count):
                place = Path(name) / "texts" / f"{number // 1000}"
                place.mkdir(parents=True, exist_ok=True)
                text = " ".join(chance.choices(words, k=WORDS_OF_FILE))
                (place / f"{number}.txt").write_text(f"{number}: {text}\n")

            def turn(_: int, folder: str = name) -> dict[str, Any]:
                settings = {
                    "DATA": f"{folder}/texts",
                    "DATA_DIR": f"{folder}/data",
                    "VOCAB_SIZE": "1000",
                    "TRAIN_TOKENS": "200000",
                    "WARMUP_TOKENS": "0",
                }
                began = time.perf_counter()
                cpu_began = resource.getrusage(resource.RUSAGE_CHILDREN)
                run("train.data.prepare", "data", **settings)
                cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
                return {
                    "seconds": time.perf_counter() - began,
                    "cpu_seconds": cpu.ru_utime
                    + cpu.ru_stime
                    - cpu_began.ru_utime
                    - cpu_began.ru_stime,
                }

            yield in_rounds("files", 1, turn) | {"files": count}


def run(module: str, *arguments: str, **settings: str) -> str:
    """What a process of ours says last. Raises RuntimeError with all of it where it fails."""
    done = subprocess.run(
        [
            "env",
            *(f"{name}={value}" for name, value in settings.items()),
            sys.executable,
            "-m",
            module,
            *arguments,
        ],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"{module} ended with exit code {done.returncode}: {done.stdout}{done.stderr}"
        )
    return done.stdout.strip().splitlines()[-1]


# ---------------------------------------------------------------------------------------------------
# The loader and the sampler
# ---------------------------------------------------------------------------------------------------


def write_manifest(folder: Path, name: str, infos: list[ShardInfo]) -> None:
    seals = [Seal((k, 0), info.documents, {}, info, None) for k, info in enumerate(infos)]
    (folder / "manifest.json").write_bytes(
        Manifest(
            source=name,
            revision="none",
            key="none",
            tokenizer_sha256=SHA256,
            shard_tokens=infos[0].tokens,
            end="all",
            seals=seals,
        ).text()
    )


def make_shards(folder: Path, counts: dict[str, int], tokens: int) -> dict[str, Path]:
    """Source -> folder with so many shards of random ids."""
    rng, made = np.random.default_rng(1), {name: folder / name for name in counts}
    for name, place in made.items():
        place.mkdir()
        write_manifest(
            place,
            name,
            [
                write_shard(
                    place / f"train_{k:05d}.bin",
                    rng.integers(0, 50_257, tokens, dtype=np.uint16),
                    1,
                    tokens,
                    SHA256,
                    name,
                    50_257,
                )
                for k in range(counts[name])
            ],
        )
    return made


def make_holes(folder: Path, counts: dict[str, int], tokens: int) -> dict[str, Path]:
    """The same with files that have a header, their full size and nothing in them; no hash fits."""
    made = make_shards(folder, dict.fromkeys(counts, 1), 1000)
    for name, place in made.items():
        (small,) = ShardSet(place).shards["train"]
        header = list(HEADER.unpack((place / small.file).read_bytes()[: HEADER.size]))
        header[3] = tokens
        infos = [
            dataclasses.replace(
                small, file=f"train_{k:05d}.bin", tokens=tokens, bytes=HEADER_BYTES + 2 * tokens
            )
            for k in range(counts[name])
        ]
        for info in infos:
            with open(place / info.file, "wb") as file:
                file.write(HEADER.pack(*header))
                file.truncate(info.bytes)
        write_manifest(place, name, infos)
    return made


def recipe(seq_len: int, batch_tokens: int) -> Config:
    return (
        Config()
        .replace(
            seq_len=seq_len,
            batch_tokens=batch_tokens,
            micro_batch_size=16,
            device="cpu",
            data_mix=",".join(f"{name}:{weight}" for name, weight in MIX.items()),
        )
        .derived()
    )


def open_loader(c: Config, folders: dict[str, Path], rank: int = 0, size: int = 1) -> Any:
    import torch

    from train.data.batch import Loader
    from train.distributed.world import World

    world = World(rank, rank, 0, size, torch.device("cpu"), "CPU", "here")
    return Loader(
        c, {name: ShardSet(place) for name, place in folders.items()}, world, end_of_text=0
    )


def loader(rounds: int, shard_tokens: int = 10_000_000) -> Iterator[dict[str, Any]]:
    """Tokens a second of Loader.batch, over a pass of 13 shards."""
    import torch

    torch.set_num_threads(1)
    c, counts = recipe(SEQ_LEN, BATCH_TOKENS), {"web": 8, "papers": 4, "exams": 1}
    with tempfile.TemporaryDirectory(dir=ROOT / "bench") as name:
        folders = make_shards(Path(name), counts, shard_tokens)

        def turn(_: int) -> dict[str, Any]:
            batches = open_loader(c, folders)
            for (
                source
            ) in batches.sources:  # checks hashes, and so reads the files into the page cache
                for shard in range(len(source.shards["train"])):
                    source.read("train", shard, [])
            steps = max(2, sum(counts.values()) * shard_tokens // c.batch_tokens)
            began = time.perf_counter()
            for step in range(steps):
                batches.batch(step)
            return {"tokens_per_s": steps * c.batch_tokens / (time.perf_counter() - began)}

        yield in_rounds("loader", rounds, turn)


def many(
    rounds: int, shards: int = 1000, shard_tokens: int = 100_000_000
) -> Iterator[dict[str, Any]]:
    """Seconds to open very many tokens, and microseconds to find a sample among them."""
    from train.data.batch import LOOK_AHEAD

    c = recipe(SEQ_LEN, BATCH_TOKENS)
    counts = {name: max(1, shards * weight // sum(MIX.values())) for name, weight in MIX.items()}
    with tempfile.TemporaryDirectory(dir=ROOT / "bench") as name:
        folders = make_holes(Path(name), counts, shard_tokens)

        def opening(_: int) -> dict[str, Any]:
            began = time.perf_counter()
            open_loader(c, folders)
            return {"seconds": time.perf_counter() - began}

        def sampling(rank: int, size: int) -> dict[str, Any]:
            batches, first = open_loader(c, folders, rank, size), 10**10 // c.batch_windows
            batches.open_shards = lambda *_: None  # nothing of these holes is to be read
            share = c.batch_windows // size
            steps = range(first, first + 16 * (LOOK_AHEAD // share))
            began = time.perf_counter()
            for step in steps:
                batches.locate(step, batches.samples(step, ()), ())
            return {"microseconds": (time.perf_counter() - began) / (len(steps) * share) * 1e6}

        yield in_rounds("start", rounds, opening) | {
            "shards": sum(counts.values()),
            "shard_tokens": shard_tokens,
        }
        yield in_rounds("sampler", rounds, lambda _: sampling(0, 1))
        yield in_rounds("sampler, one of 8", rounds, lambda _: sampling(5, 8))


# ---------------------------------------------------------------------------------------------------


def in_rounds(part: str, rounds: int, turn: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """The rounds of a part, each with the share of the machine that went to others."""
    taken = []
    for number in range(rounds):
        foreign = Foreign([], time.monotonic())
        found = turn(number)
        taken.append({"foreign_percent": foreign.percent(time.monotonic())} | found)
    return {"part": part, "rounds": taken}


HEADER_ROWS = ("| data | median (least-most) | target | foreign load, % |", "|---|---|---|---|")


def row(found: dict[str, Any], spread: Callable[[list[float], int], str]) -> str:
    """A line of the table: medians over rounds, with the least and the most."""

    def of(key: str, digits: int, unit: float = 1.0) -> str:
        return spread([taken[key] / unit for taken in found["rounds"]], digits)

    part = found["part"]
    if part == "prepare":
        what, target = "make data, of encode_batch alone", "at least 0.8"
        value = (
            f"{of('ratio', 2)}: {of('text_bytes_per_s', 2, 1e6)} MB and {of('tokens_per_s', 2, 1e6)} M tokens/s "
            f"beside {of('alone_bytes_per_s', 2, 1e6)} MB/s"
        )
    elif part == "loader":
        what, value, target = (
            "loader, M tokens/s on one core",
            of("tokens_per_s", 1, 1e6),
            "at least 20",
        )
    elif part == "files":
        seconds = statistics.median(taken["cpu_seconds"] for taken in found["rounds"])
        what, target = f"make data, {found['files']:,} small files, s", "under 2 ms of CPU a file"
        per_file = 1000 * seconds / found["files"]
        value = f"{of('seconds', 1)}, of CPU {of('cpu_seconds', 1)}: {per_file:.2f} ms a file"
    elif part == "start":
        billions = found["shards"] * found["shard_tokens"] / 1e9
        what = f"opening {billions:.0f} billion tokens in {found['shards']:,} shards, s"
        value, target = of("seconds", 3), "under 2"
    else:
        what, value, target = f"{part}, microseconds a window", of("microseconds", 2), "under 2"
    return f"| {what} | {value} | {target} | {worst(found['rounds'])} |"


def main(part: str, *arguments: str) -> None:
    if part == "alone":
        alone(Path(arguments[0]), list(arguments[1:]))
        return
    rounds, given = int(arguments[0]), arguments[1]
    if part == "prepare":
        results = prepare(rounds, given)
    elif part == "files":
        results = files()
    elif part == "loader":
        results = loader(rounds)
    else:
        results = many(rounds)
    for found in results:
        say(**found)


if __name__ == "__main__":
    main(*sys.argv[1:])
