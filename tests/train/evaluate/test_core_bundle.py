"""Bundles of CORE: here as a folder or a .zip, or from servers that misbehave. Damage is an error, and never kept."""

import hashlib
import http.server
import threading
import zipfile

import pytest

from tests.core_bundle import TASKS, files, make_folder, make_zip
from train.data.sources import hub
from train.evaluate.core.bundle import Bundle, open_bundle
from train.evaluate.core.tasks import CORE_TASKS, CoreError

PAGE = b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>'.ljust(278)
PIQA, WINOGRAD = (f"eval_data/{TASKS[label][0]}" for label in ("piqa", "winograd"))
FOUND = "(a web or error page, it starts with b'<?xml version="


class Server(http.server.ThreadingHTTPServer):
    """Answers each request with (status, content, bytes that come) of its path, the last one for ever."""

    answers: dict[str, list[tuple[int, bytes, int]]]
    asked: list[str]

    def address(self, name, sha256):
        return f"http://127.0.0.1:{self.server_port}/{name}@sha256:{sha256}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        self.server.asked.append(self.path)
        answers = self.server.answers[self.path.strip("/")]
        status, content, count = answers[0] if len(answers) == 1 else answers.pop(0)
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:count])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(hub, "FIRST_PAUSE_S", 0.0)
    with Server(("127.0.0.1", 0), Handler) as one:
        one.answers, one.asked = {}, []
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one
        one.shutdown()


# ---- Here


def test_a_folder_and_a_zip_of_it_are_the_same_bundle(tmp_path):
    folder = Bundle(make_folder(tmp_path / "here"))
    archive = Bundle(make_zip(tmp_path / "here.zip"))
    assert folder.sha256 == archive.sha256
    assert len(folder.tasks) == 4
    assert list(map(folder.examples, folder.tasks)) == list(map(archive.examples, archive.tasks))
    changed = files() | {PIQA: files()[PIQA].replace(b"ab", b"ba")}
    assert Bundle(make_folder(tmp_path / "other", changed)).sha256 != folder.sha256


def test_missing_tasks_are_named_with_the_reason(tmp_path):
    found = Bundle(make_folder(tmp_path, files(("copa", "piqa")) | {PIQA: b"\n"}))
    assert [task.label for task in found.tasks] == ["copa"]
    assert set(found.missing) == set(CORE_TASKS) - {"copa"}
    assert found.missing["winograd"] == f"the bundle has no {WINOGRAD}"
    assert found.missing["piqa"] == f"{PIQA} is empty"
    assert found.missing["squad"] == "core.yaml does not name it"
    assert "boolq" in found.describe()


def test_a_bundle_may_bring_the_results_of_other_models(tmp_path):
    head = b"Task, Accuracy, Centered\ncopa, 0.62, "
    content = files() | {
        "openai-community-gpt2.csv": head + b"0.24\nCORE, , 0.1139\n",
        "openai-community-gpt2-xl.csv": head + b"no number\n",
    }
    bundle = Bundle(make_zip(tmp_path / "a.zip", content))
    assert bundle.tables == {"gpt2": {"copa": 0.24, "CORE": 0.1139}}


def flip(path, text, count):
    """Change this many bytes of a file, from a text on."""
    content = bytearray(path.read_bytes())
    start = content.index(text)
    for place in range(start, start + count):
        content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.fault(43)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda path: path.write_bytes(PAGE),
            f"278 bytes that are no whole .zip of a bundle {FOUND}",
        ),
        (lambda path: path.write_bytes(b""), "0 bytes that are no whole .zip of a bundle"),
        (lambda path: path.write_bytes(b"PK\x03\x04 cut"), "8 bytes that are no whole .zip"),
        (lambda path: None, "is not there; give a folder or a .zip with core.yaml"),
        (lambda path: make_folder(path, {"a": b"a"}), "has no core.yaml, so that it is no bundle"),
        (lambda path: make_folder(path, files(())), "none of its 4 tasks is there"),
        (
            lambda path: flip(make_zip(path), b"context_options", 1),
            f"{WINOGRAD} cannot be read (BadZipFile: Bad CRC-32",
        ),
        (
            lambda path: flip(
                make_zip(path, {WINOGRAD: b"x" * 99} | files(), zipfile.ZIP_DEFLATED), b"jsonl", 40
            ),
            f"{WINOGRAD} cannot be read (",
        ),
    ],
    ids=["page", "empty", "cut", "absent", "no bundle", "no task", "flipped", "packed"],
)
def test_what_is_no_whole_bundle_is_refused_by_name(tmp_path, make, words):
    path = tmp_path / "bundle.zip"
    make(path)
    with pytest.raises(CoreError) as raised:
        open_bundle(str(path), tmp_path)
    assert words in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_task_without_examples_is_refused_by_its_file(tmp_path):
    folder = make_folder(tmp_path / "bundle", files() | {WINOGRAD: PAGE})
    with pytest.raises(
        CoreError, match=r"winograd.jsonl \(278 bytes\) line 1 is no example of schema"
    ):
        open_bundle(str(folder), tmp_path)


# ---- From a server


def test_it_is_downloaded_until_it_is_whole_and_then_kept(server, tmp_path):
    content = make_zip(tmp_path / "a.zip").read_bytes()
    server.answers["a.zip"] = [(200, content, 99), (200, content, len(content))]
    address = server.address("a.zip", hashlib.sha256(content).hexdigest())
    found = open_bundle(address, tmp_path / "data")
    assert found.path.read_bytes() == content
    assert found.path.parent == tmp_path / "data" / "core"
    lock = found.path.with_name(".lock")
    lock.unlink()
    lock.mkdir()  # as where nothing can be written
    assert open_bundle(address, tmp_path / "data").sha256 == found.sha256
    lock.rmdir()
    assert len(server.asked) == 2

    found.path.write_bytes(PAGE)  # damaged here: downloaded again
    assert open_bundle(address, tmp_path / "data").sha256 == found.sha256


@pytest.mark.fault(43)
@pytest.mark.parametrize(
    ("answer", "words", "tries"),
    [
        ((403, PAGE, 278), "it answers 403 with b'<?xml", 1),
        ((404, b"gone", 4), "it answers 404 with b'gone'", 1),
        ((503, b"later", 5), "it answers 503 with b'later'", hub.TRIES),
        ((200, PAGE, 278), f"not sha256:{17 * '0'}..., in 278 bytes {FOUND}", hub.TRIES),
        ((200, PAGE, 99), "in 99 bytes", hub.TRIES),
    ],
    ids=["refused", "missing", "busy", "page", "cut"],
)
def test_an_answer_that_is_no_bundle_is_shown_and_not_kept(server, tmp_path, answer, words, tries):
    server.answers["a.zip"] = [answer]
    with pytest.raises(CoreError, match=r"/a\.zip: .*give its path as CORE_BUNDLE") as raised:
        open_bundle(server.address("a.zip", 64 * "0"), tmp_path / "data")
    assert words in str(raised.value)
    assert len(server.asked) == tries
    assert [path.name for path in (tmp_path / "data" / "core").iterdir()] == [".lock"]
