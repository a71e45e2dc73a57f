"""train/data/sources/fetch.py and hub.py: a file is there and the right one, or it is said why not."""

import gzip
import json
import re
import socket
import threading
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import huggingface_hub
import pytest

from tests.faults.hub import PAGE, REVISION, Repository, hub, questions
from tests.train.data.sources.source_files import declare, refusal
from train.data.sources import hub as asking
from train.data.sources import pin
from train.data.sources.fetch import Files
from train.data.sources.pin import File, Pinned
from train.data.sources.source import CorpusError, Source

# ---- Files here


@pytest.mark.fault(10, 11)
def test_a_file_here_that_changed_or_went_is_named_with_what_was_expected(tmp_path):
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


def test_one_file_at_most_is_downloaded_ahead_and_none_holds_up_another(tmp_path, monkeypatch):
    begun, go = [], threading.Event()

    def get(self, i):
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
def slept(monkeypatch):
    """How long was slept; time passes by sleeping only."""
    pauses: list[float] = []
    monkeypatch.setattr(asking.time, "sleep", pauses.append)
    monkeypatch.setattr(asking.time, "monotonic", lambda: sum(pauses))
    monkeypatch.setattr(asking, "take_over", lambda: None)
    return pauses


def ask(error):
    """Return what is said where the answer is always this error."""

    def answer():
        raise error

    return refusal(asking.ask, "a/b", "it", answer)


@pytest.mark.fault(12)
def test_pauses_grow_with_jitter_and_are_bounded_in_number_and_time(slept):
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
def test_what_asking_again_cannot_help_is_not_asked_again(slept, error, said):
    assert re.search(said, ask(error))
    if isinstance(error, ValueError):
        wrapped = KeyError("x")
        wrapped.__cause__ = error
        assert re.search(said, ask(wrapped))
    assert slept == []


@pytest.mark.fault(12)
def test_without_a_network_the_hub_is_asked_twice(slept, tmp_path, monkeypatch):
    failed = httpx.ConnectError("no address")
    failed.__cause__ = socket.gaierror(-3, "Temporary failure in name resolution")
    message = ask(failed)
    assert "no network" in message and len(slept) == asking.TRIES_OFFLINE - 1 == 1

    def dataset_info(*arguments, **options):
        raise failed

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    message = refusal(pin.pin, Source("x", "hub", 0.1, repository="a/b"), tmp_path)
    assert message.startswith("Cannot list the files of a/b on the Hub: no network. Check the")


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
TRAIN = f"/resolve/{REVISION}/train.jsonl.gz"
QUESTIONS = gzip.compress(questions(), mtime=0)
PLACES = ("about", "file", "head file")


class Answer(NamedTuple):
    """What reading a data set of the hub gave.

    Attributes:
        repository: as it was served.
        documents: their number, or the error in words.
        left: files in the source's folder.
        log: lines about this repository.
    """

    repository: Repository
    documents: Any
    seconds: float
    left: list[str]
    log: list[str]

    def asked(self, path):
        return self.repository.requests.count(path)


def get(
    folder,
    *manners,
    retry_after=None,
    closed=False,
    **constants,
):
    """Read a data set in each manner: "500 file*2" for twice. Nothing but pins may be left. closed: there is no hub."""
    served = {}
    for manner in manners:
        words, _, times = manner.partition("*")
        name = f"a/{manner.replace(' ', '-').replace('*', '-')}"
        files = {"train.jsonl.gz": QUESTIONS}
        served[name] = Repository(files, words, int(times or 1000), retry_after)
    constants = {"FIRST_PAUSE_S": 0.01, "TRIES": 4} | constants
    with hub(repositories=served) as server:
        if not closed:
            found, log = server.run(folder, GET, folder, json.dumps(constants), *served)
    if closed:
        found, log = server.run(folder, GET, folder, json.dumps(constants), *served)
    answers = {}
    for manner, (name, repository) in zip(manners, served.items(), strict=True):
        own = [line for line in log.splitlines() if f"of {name}" in line]
        answers[manner] = Answer(repository, *found[name], own)
        assert all(file.startswith("pin-") for file in answers[manner].left), answers[manner]
    return answers


def path_of(name, at):
    return {
        "about": f"GET /api/datasets/{name}",
        "file": f"GET /datasets/{name}{TRAIN}",
        "head file": f"HEAD /datasets/{name}{TRAIN}",
    }[at]


@pytest.mark.fault(12)
def test_what_is_refused_is_not_asked_for_again_and_named_with_the_remedy(tmp_path):
    manners = [f"{how} {at}" for how in ("401", "403", "404", "gated") for at in PLACES]
    for manner, answer in get(tmp_path, *manners).items():
        how, _, at = manner.partition(" ")
        name = f"a/{manner.replace(' ', '-')}"
        assert answer.asked(path_of(name, at)) == 1, (name, answer.repository.requests)
        said = answer.documents
        assert said.startswith("CorpusError: ") and "\n" not in said
        assert f"https://huggingface.co/datasets/{name}" in said
        assert "set HF_TOKEN" in said and "accept the license" in said
        assert ("gated" in said.replace(name, "")) == (how == "gated")
        assert how == "gated" or f"({how}" in said
        assert answer.seconds < 30 and answer.log == []


@pytest.mark.fault(12)
def test_what_fails_for_a_moment_is_asked_for_again(tmp_path):
    manners = [f"{how} {at}*2" for how in ("429", "500", "503", "408", "page") for at in PLACES]
    answers = get(tmp_path, *manners, "wrong file*2", "short file*1", "good")
    for manner, answer in answers.items():
        assert answer.documents == 60, (manner, answer)
        if not manner.startswith(("short", "good")):
            again = [line for line in answer.log if "asking again in" in line]
            assert len(again) == 2, (manner, answer)
        if manner == "page file*2":
            assert "web page comes instead (72 bytes, it starts with b'<!DOCTYPE" in again[0]
    assert answers["good"].asked(f"GET /datasets/a/good{TRAIN}") == 1


@pytest.mark.fault(12)
def test_what_goes_on_failing_is_given_up_with_its_last_cause(tmp_path):
    causes = {
        "500 about": "it answers 500",
        "429 file": "it answers 429",
        "page file": f"a web page comes instead ({len(PAGE)} bytes, it starts with b'<!DOCTYPE",
        "wrong file": "its hash is sha256:",
        "503 head file": "it answers 503",
    }
    answers = get(tmp_path, *causes)
    for manner, answer in answers.items():
        said = answer.documents.split(": ", 1)[1]
        assert said.startswith("the hub does not give ") and causes[manner] in said
        assert "asked 4 times in" in said and "check the network" in said and answer.seconds < 60
    assert answers["429 file"].asked(f"GET /datasets/a/429-file{TRAIN}") == 4
    requests = answers["500 about"].repository.requests
    assert requests == ["GET /api/datasets/a/500-about"] * 4


@pytest.mark.fault(12)
def test_retry_after_is_waited_for(tmp_path):
    for answer in get(tmp_path, "429 about*1", "503 file*1", retry_after=1).values():
        assert answer.documents == 60 and answer.seconds >= 1
    for answer in get(tmp_path, "429 about", "429 file", retry_after=3600).values():
        assert "it asks to wait 3600 s; asked 1 times" in answer.documents and answer.seconds < 60


@pytest.mark.slow
@pytest.mark.fault(12)
def test_silence_and_bodies_that_stay_short_are_given_up_in_time(tmp_path):
    manners = ("hangs about", "hangs file", "hangs head file", "short file")
    for answer in get(tmp_path, *manners, SILENCE_S=0.3, TOTAL_S=3.0).values():
        said = answer.documents.split(": ", 1)[1]
        assert said.startswith("the hub does not give") and answer.seconds < 20
    for answer in get(tmp_path / "slow", "slow file*1", "slow about*1").values():
        assert answer.documents == 60


@pytest.mark.fault(12)
def test_no_hub_at_all_is_a_network_to_check(tmp_path):
    answer = get(tmp_path, "good", closed=True)["good"]
    assert "Connection refused" in answer.documents and "check the network" in answer.documents
    assert answer.seconds < 50


@pytest.mark.fault(12)
def test_a_file_that_was_left_here_is_used_if_it_is_right_and_halves_are_deleted(
    tmp_path,
):
    folder = tmp_path / "a-good" / "downloads" / REVISION[:12]
    half = folder / ".cache" / "huggingface" / "download" / "x.incomplete"
    for left, asked in ((QUESTIONS, 0), (PAGE, 1)):
        half.parent.mkdir(parents=True)
        half.write_bytes(b"half")
        (folder / "train.jsonl.gz").write_bytes(left)
        answer = get(tmp_path, "good")["good"]
        assert answer.documents == 60
        assert answer.asked(f"GET /datasets/a/good{TRAIN}") == asked
        assert not folder.exists()
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    file = File("train.jsonl.gz", 1, "sha256:0")
    Files(Pinned(Source("a-good", "hub", 0.1), REVISION, (file,)), tmp_path / "a-good")
    assert half.parent.exists() and not half.exists()
