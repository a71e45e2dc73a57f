"""A hub that refuses, fails, or sends something else than what was asked for: while data is prepared, never later."""

import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from record import metrics as record_reader
from tests.faults.conftest import LAUNCH, STEPS
from tests.faults.hub import REPOSITORY, REVISION, Hub, Repository, hub, questions
from tests.running import ROOT, environment, train

ABOUT, FILE = (
    f"GET /api/datasets/{REPOSITORY}",
    f"GET /datasets/{REPOSITORY}/resolve/{REVISION}/train.jsonl",
)


def settings(folder: Path, data: dict[str, str], server: Hub) -> dict[str, str]:
    return environment(
        folder,
        {"TOKENIZER": data["TOKENIZER"], "DATA_DIR": str(folder / "data")},
        DATA_MIX="usmle:1",
        SHARD_TOKENS=1000,
        **STEPS,
    ) | server.environment(folder)


def prepare(
    folder: Path,
    data: dict[str, str],
    manner: str,
    bad_times: int = 1000,
    retry_after: int | None = None,
    script: str = "",
) -> tuple[int, str, Counter[str]]:
    """(exit code, what it said, how often what was asked for) of make data."""
    folder.mkdir(parents=True, exist_ok=True)
    served = Repository({"train.jsonl": questions()}, manner, bad_times, retry_after)
    main = f"{script}import sys; from train.data import prepare; sys.exit(prepare.main(['data']))"
    command = ["-c", main] if script else ["-m", "train.data.prepare", "data"]
    with hub(repositories={REPOSITORY: served}) as server:
        done = subprocess.run(
            [sys.executable, *command],
            env=settings(folder, data, server),
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=150,
            check=False,
        )
    assert "Traceback" not in done.stdout, done.stdout
    return done.returncode, done.stdout, Counter(served.requests)


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "data").rglob("*.bin")}


def left_over(folder: Path) -> list[str]:
    """Files of downloads that are there behind a preparation."""
    return [
        path.name
        for path in (folder / "data").rglob("*")
        if "downloads" in path.parts and path.is_file()
    ]


@pytest.mark.slow
@pytest.mark.fault(12)
def test_what_fails_for_a_moment_is_asked_for_again_and_the_shards_are_the_same(
    tmp_path: Path, data: dict[str, str]
) -> None:
    code, out, _ = prepare(tmp_path / "good", data, "good")
    good = shards(tmp_path / "good")
    assert code == 0 and len(good) > 4, out
    assert not left_over(tmp_path / "good") and "asking again" not in out

    def check(manner: str) -> None:
        folder = tmp_path / manner.replace(" ", "_")
        code, out, asked = prepare(
            folder,
            data,
            manner,
            bad_times=2,
            script="from train.data.sources import hub; hub.FIRST_PAUSE_S = 0.2\n",
        )
        assert code == 0, (manner, out)
        assert ("asking again in" in out) is not manner.startswith(("slow", "short")), (manner, out)
        assert asked[ABOUT if manner.endswith("about") else FILE] >= 2 or manner.startswith(
            "slow"
        ), (manner, asked)
        assert shards(folder) == good and not left_over(folder), manner

    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                check,
                [
                    "429 file",
                    "500 file",
                    "503 file",
                    "short file",
                    "page file",
                    "wrong file",
                    "slow file",
                    "429 about",
                    "500 about",
                    "page about",
                    "slow about",
                ],
            )
        )


@pytest.mark.slow
def test_a_file_that_the_tokenizer_had_fetched_ahead_is_not_fetched_again_for_the_shards(
    tmp_path: Path, data: dict[str, str]
) -> None:
    served = Repository({"a.jsonl": questions(), "b.jsonl": questions()}, "slow file", 1000)
    script = (
        "import sys; from train.data import prepare; prepare.TOKENIZER_TEXT_BYTES = 2000\n"
        "sys.exit(prepare.main(['data']))"
    )
    with hub(repositories={REPOSITORY: served}) as server:
        env = settings(tmp_path, data, server) | {"TOKENIZER": "train", "VOCAB_SIZE": "300"}
        out = train(env, command=[sys.executable, "-c", script])
    assert "trained BPE tokenizer" in out and "asking again" not in out
    asked = Counter(served.requests)
    assert [asked[FILE.replace("train.jsonl", name)] for name in served.files] == [1, 1]
    assert not left_over(tmp_path)


@pytest.mark.slow
@pytest.mark.fault(12)
def test_training_asks_the_hub_for_nothing_and_only_one_process_prepares(
    tmp_path: Path, data: dict[str, str]
) -> None:
    with hub() as server:
        env = settings(tmp_path, data, server) | {"DATA_STREAM": "0"}
        command = [sys.executable, "-m", "train.data.prepare"]
        train(env, command=command)
        asked = Counter(server.requests)
        assert asked[FILE] == 1 and asked[ABOUT] == 1
        train(env, command=command)
        train(env | {"NPROC": "2"}, command=LAUNCH)
        assert Counter(server.requests) == asked
    steps = [
        r
        for r in record_reader.read_records(tmp_path / "run" / "metrics.jsonl")
        if r["event"] == "step"
    ]
    assert len(steps) == STEPS["MAX_STEPS"]


@pytest.mark.slow
@pytest.mark.fault(12)
def test_what_is_prepared_for_a_run_that_streams_is_the_pin_alone(
    tmp_path: Path, data: dict[str, str]
) -> None:
    with hub() as server:
        out = train(
            settings(tmp_path, data, server), command=[sys.executable, "-m", "train.data.prepare"]
        )
        assert (
            "data: usmle will be streamed while the run trains; make data prepares all of it beforehand"
            in out
        )
        assert not [
            line for line in server.requests if "/resolve/" in line and line.endswith("train.jsonl")
        ]
    assert not shards(tmp_path) and list((tmp_path / "data" / "usmle").glob("pin-*.json"))
