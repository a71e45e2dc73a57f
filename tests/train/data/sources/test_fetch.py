"""train/data/sources/fetch.py and hub.py: a file is there and the right one, or it is said why not."""

import gzip
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.faults.hub import PAGE, REVISION, Hub, Repository, hub, questions
from tests.train.data.sources.source_files import declare, refusal
from train.data.sources import hub as asking
from train.data.sources.fetch import Files
from train.data.sources.pin import File, Pinned
from train.data.sources.source import CorpusError, Source

# ---- Files here


@pytest.mark.fault(10, 11)
def test_a_file_here_that_changed_or_went_is_named_with_what_was_expected(tmp_path: Path) -> None:
    p = declare(tmp_path, {f"{name}.jsonl": b'{"text": "%c"}\n' % ord(name) for name in "abc"})
    files = Files(p, tmp_path / "data")
    (tmp_path / "a.jsonl").write_text('{"text": "A"}\n')
    (tmp_path / "b.jsonl").write_text("<html>")
    (tmp_path / "c.jsonl").unlink()
    for number, said in enumerate(
        (
            r"a\.jsonl: its hash is xxh3:.*, not xxh3:.* it changed since papers was",
            r"b\.jsonl: 6 bytes, not 14 \(a web or error page, it starts with b'<html",
            r"c\.jsonl: cannot be read \(No such file or directory\).* run: make data",
        )
    ):
        assert re.search(said, refusal(files.path, number))


# ---- Downloads, without a hub


def test_one_file_at_most_is_downloaded_ahead_and_none_holds_up_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = [], threading.Event()

    def get(self: Files, i: int) -> Path:
        is_ahead = threading.current_thread() is not threading.main_thread()
        begun.append((i, is_ahead))
        assert not is_ahead or go.wait(60)
        if i == 4:
            raise CorpusError(f"no {i}")
        return Path(str(i))

    monkeypatch.setattr(Files, "downloaded", get)
    listed = tuple(File(f"{i}.jsonl", 1, "sha256:0") for i in range(5))
    files = Files(Pinned(Source("x", "hub", 0.1, repository="a/b"), REVISION, listed), tmp_path)
    assert files.path(0) == Path("0")
    files.prefetch(1)
    files.prefetch(2)
    threading.Timer(0.05, go.set).start()
    assert files.path(1) == Path("1") and files.path(2) == Path("2")
    assert begun == [(0, False), (1, True), (2, False)]
    go.clear()
    files.prefetch(0)
    assert files.path(3) == Path("3")  # as when a shard is made again
    files.prefetch(4)
    go.set()
    assert "no 4" in refusal(files.path, 4)
    files.prefetch(5)
    files.close()
    assert sorted(begun[3:]) == [(0, True), (3, False), (4, True)]


# ---- The rules of asking, without a hub


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was slept; time passes by sleeping only."""
    pauses: list[float] = []
    monkeypatch.setattr(asking.time, "sleep", pauses.append)
    monkeypatch.setattr(asking.time, "monotonic", lambda: sum(pauses))
    monkeypatch.setattr(asking, "take_over", lambda: None)
    return pauses


def ask(error: Exception) -> str:
    """Return what is said where the answer is always this error."""

    def answer() -> None:
        raise error

    return refusal(asking.ask, "a/b", "it", answer)


@pytest.mark.fault(12)
def test_pauses_grow_with_jitter_and_are_bounded_in_number_and_time(slept: list[float]) -> None:
    said = r"the hub does not give it: it answers 500; asked \d times in \d+ s; check"
    assert re.match(said, ask(asking.Again("it answers 500")))
    assert 5 <= len(slept) <= asking.TRIES - 1 and sum(slept) <= asking.TOTAL_S
    for k, pause in enumerate(slept):
        assert 0.5 <= pause / min(asking.LONGEST_PAUSE_S, 2**k) <= 1.5
    assert len({pause / 2**k for k, pause in enumerate(slept[:5])}) == 5


@pytest.mark.fault(12)
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(28, "No space left on device"),
            "cannot keep it: .*No space left on .*; make room",
        ),
        (
            ValueError("no such"),
            "cannot use it: ValueError: no such; check the source's repository",
        ),
        (FileNotFoundError("no files"), "cannot use it: FileNotFoundError: no files; check the s"),
        (asking.Late("no whole answer came"), "no whole answer came; asked 1 times"),
    ],
)
def test_what_asking_again_cannot_help_is_not_asked_again(
    slept: list[float], error: Exception, said: str
) -> None:
    assert re.search(said, ask(error))
    if isinstance(error, ValueError):
        wrapped = KeyError("x")
        wrapped.__cause__ = error
        assert re.search(said, ask(wrapped))
    assert slept == []


# ---- Against a hub

GET = """
import json, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from train.data.sources import fetch, hub, pin, rows
from train.data.sources.source import Source
for name, value in json.loads(sys.argv[2]).items():
    assert hasattr(hub, name)
    setattr(hub, name, value)
import datasets, huggingface_hub

def get(repository):
    s = Source(repository.replace("/", "-"), "hub", 0.1, repository=repository, text="question")
    folder, began = Path(sys.argv[1]) / s.name, time.monotonic()
    try:
        p = pin.pin(s, folder)
        files = fetch.Files(p, folder)
        count = sum(isinstance(item, rows.Document) for item in rows.documents(p, files))
        files.close()
        said = count
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return repository, said, time.monotonic() - began, [str(path.relative_to(folder)) for path in folder.rglob("*")
                                                        if path.is_file() and ".cache" not in path.parts]

with ThreadPoolExecutor(4) as pool:
    print(json.dumps({name: rest for name, *rest in pool.map(get, sys.argv[3:])}))
"""
FAST = {"FIRST_PAUSE_S": 0.01, "TRIES": 4}
TRAIN = f"/resolve/{REVISION}/train.jsonl.gz"


def repositories(
    *manners: str, retry_after: int | None = None, files: dict[str, bytes] | None = None
) -> dict[str, Repository]:
    """A data set for each manner, "500 file*2" for twice: named a/500-file-2."""
    made = {}
    for manner in manners:
        words, _, times = manner.partition("*")
        content = files or {"train.jsonl.gz": gzip.compress(questions(), mtime=0)}
        made[f"a/{manner.replace(' ', '-').replace('*', '-')}"] = Repository(
            content, words, int(times or 1000), retry_after
        )
    return made


def get(
    server: Hub, folder: Path, constants: dict[str, float]
) -> tuple[dict[str, tuple[Any, float, list]], str]:
    """What each of the hub's data sets gave: (documents or error, seconds, files left); and the log."""
    return server.run(folder, GET, folder, json.dumps(constants), *server.repositories)


def left_nothing(left: list[str]) -> bool:
    return all(name.startswith("pin-") for name in left)


@pytest.mark.fault(12)
def test_what_is_refused_is_not_asked_for_again_and_named_with_the_remedy(tmp_path: Path) -> None:
    manners = [
        f"{manner} {at}"
        for manner in ("401", "403", "404", "gated")
        for at in ("about", "file", "head file")
    ]
    with hub(repositories=repositories(*manners)) as server:
        found, log = get(server, tmp_path, FAST)
        for name, repository in server.repositories.items():
            said, seconds, left = found[name]
            asked = {
                "about": f"GET /api/datasets/{name}",
                "file": f"GET /datasets/{name}{TRAIN}",
                "head file": f"HEAD /datasets/{name}{TRAIN}",
            }[repository.manner.partition(" ")[2]]
            assert repository.requests.count(asked) == 1, (name, repository.requests)
            assert (
                said.startswith("CorpusError: ")
                and f"https://huggingface.co/datasets/{name}" in said
            ), said
            assert "set HF_TOKEN" in said and "accept the license" in said and "\n" not in said
            assert ("gated" in said.replace(name, "")) == repository.manner.startswith("gated")
            assert repository.manner.startswith("gated") or f"({repository.manner[:3]}" in said
            assert left_nothing(left) and seconds < 30
        assert "asking again" not in log


@pytest.mark.fault(12)
def test_what_fails_for_a_moment_is_asked_for_again(tmp_path: Path) -> None:
    manners = [
        f"{manner} {at}*2"
        for manner in ("429", "500", "503", "408", "page")
        for at in ("about", "file", "head file")
    ]
    with hub(repositories=repositories(*manners, "wrong file*2", "short file*1", "good")) as server:
        found, log = get(server, tmp_path, FAST)
        for name, repository in server.repositories.items():
            said, _, left = found[name]
            assert said == 60 and left_nothing(left), (name, said, left)
            if not repository.manner.startswith(("short", "good")):
                lines = [
                    line
                    for line in log.splitlines()
                    if f"of {name}" in line and "asking again in" in line
                ]
                assert len(lines) == 2, (name, log)
        assert "web page comes instead (72 bytes, it starts with b'<!DOCTYPE" in log
        assert server.repositories["a/good"].requests.count(f"GET /datasets/a/good{TRAIN}") == 1


@pytest.mark.fault(12)
def test_what_goes_on_failing_is_given_up_with_its_last_cause(tmp_path: Path) -> None:
    with hub(
        repositories=repositories(
            "500 about", "429 file", "page file", "wrong file", "503 head file"
        )
    ) as server:
        found, _ = get(server, tmp_path, FAST)
        for name, said in {
            "a/500-about": "it answers 500",
            "a/429-file": "it answers 429",
            "a/page-file": f"a web page comes instead ({len(PAGE)} bytes, it starts with b'<!DOCTYPE",
            "a/wrong-file": "its hash is sha256:",
            "a/503-head-file": "it answers 503",
        }.items():
            message, seconds, left = found[name]
            assert (
                message.split(": ", 1)[1].startswith("the hub does not give ") and said in message
            ), message
            assert "asked 4 times in" in message and "check the network" in message and seconds < 60
            assert left_nothing(left), left
        assert (
            server.repositories["a/429-file"].requests.count(f"GET /datasets/a/429-file{TRAIN}")
            == 4
        )
        assert server.repositories["a/500-about"].requests == ["GET /api/datasets/a/500-about"] * 4


@pytest.mark.fault(12)
def test_retry_after_is_waited_for(tmp_path: Path) -> None:
    with hub(repositories=repositories("429 about*1", "503 file*1", retry_after=1)) as server:
        found, _ = get(server, tmp_path, FAST)
        assert all(said == 60 and seconds >= 1 for said, seconds, _ in found.values()), found
    with hub(repositories=repositories("429 about", "429 file", retry_after=3600)) as server:
        found, _ = get(server, tmp_path, FAST)
        assert all(
            "it asks to wait 3600 s; asked 1 times" in said and seconds < 60
            for said, seconds, _ in found.values()
        ), found


@pytest.mark.slow
@pytest.mark.fault(12)
def test_silence_and_bodies_that_stay_short_are_given_up_in_time(tmp_path: Path) -> None:
    with hub(
        repositories=repositories("hangs about", "hangs file", "hangs head file", "short file")
    ) as server:
        found, _ = get(server, tmp_path, FAST | {"SILENCE_S": 0.3, "TOTAL_S": 3.0})
        for said, seconds, left in found.values():
            said = said.split(": ", 1)[1]
            assert (
                said.startswith("the hub does not give") and seconds < 20 and left_nothing(left)
            ), found
    with hub(repositories=repositories("slow file*1", "slow about*1")) as server:
        found, _ = get(server, tmp_path / "slow", FAST)
        assert all(said == 60 for said, _, _ in found.values()), found


@pytest.mark.fault(12)
def test_no_hub_at_all_is_a_network_to_check(tmp_path: Path) -> None:
    with hub(repositories=repositories("good")) as server:
        pass
    found, _ = get(server, tmp_path, FAST)
    said, seconds, _ = found["a/good"]
    assert "Connection refused" in said and "check the network" in said and seconds < 50


@pytest.mark.fault(12)
def test_a_file_that_was_left_here_is_used_if_it_is_right_and_halves_are_deleted(
    tmp_path: Path,
) -> None:
    content = {"train.jsonl.gz": gzip.compress(questions(), mtime=0)}
    with hub(repositories=repositories("good", files=content)) as server:
        folder = tmp_path / "a-good" / "downloads" / REVISION[:12]
        half = folder / ".cache" / "huggingface" / "download" / "x.incomplete"
        half.parent.mkdir(parents=True)
        for left, asked in ((content["train.jsonl.gz"], 0), (PAGE, 1)):
            half.write_bytes(b"half")
            (folder / "train.jsonl.gz").write_bytes(left)
            found, _ = get(server, tmp_path, FAST)
            assert (
                found["a/good"][0] == 60
                and server.requests.count(f"GET /datasets/a/good{TRAIN}") == asked
            )
            assert not folder.exists()
            half.parent.mkdir(parents=True)
        half.write_bytes(b"half")
        Files(
            Pinned(
                Source("a-good", "hub", 0.1), REVISION, (File("train.jsonl.gz", 1, "sha256:0"),)
            ),
            tmp_path / "a-good",
        )
        assert half.parent.exists() and not half.exists()
