"""Bundles of CORE: here as a folder or a .zip, or from servers that misbehave. Damage is an error, and never kept."""

import hashlib
import http.server
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core_bundle import TASKS, files, make_folder, make_zip
from train.data.sources import hub
from train.evaluate.core.bundle import Bundle, open_bundle
from train.evaluate.core.tasks import CORE_TASKS, CoreError

PAGE = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code><Message>Access Denied</Message>'
    b"<RequestId>0123456789ABCDEF</RequestId></Error>"
).ljust(278)


class Server(http.server.ThreadingHTTPServer):
    """Path -> (content, manner); manners: a status, or breaks: half of it comes, the first time or always."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.served: dict[str, tuple[bytes, str]] = {}
        self.asked: list[str] = []

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.strip("/")
        self.server.asked.append(name)
        content, manner = self.server.served.get(name, (b"gone", "404"))
        self.send_response(int(manner) if manner.isdigit() else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        is_first = self.server.asked.count(name) == 1
        breaks = manner == "always breaks" or (manner == "breaks" and is_first)
        self.wfile.write(content[: len(content) // 2] if breaks else content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(hub, "FIRST_PAUSE_S", 0.0)
    with Server() as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one
        one.shutdown()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# ---- Here


def test_a_folder_and_a_zip_of_it_are_the_same_bundle(tmp_path: Path) -> None:
    folder, archive = (
        Bundle(make_folder(tmp_path / "here")),
        Bundle(make_zip(tmp_path / "here.zip")),
    )
    assert folder.sha256 == archive.sha256 and len(folder.tasks) == 4
    assert [folder.examples(task) for task in folder.tasks] == [
        archive.examples(task) for task in archive.tasks
    ]
    name = "eval_data/" + TASKS["copa"][0]
    changed = files() | {name: files()[name].replace(b"ab", b"ba")}
    assert Bundle(make_folder(tmp_path / "other", changed)).sha256 != folder.sha256


def test_missing_tasks_are_named_with_the_reason(tmp_path: Path) -> None:
    content = files(("copa", "piqa")) | {"eval_data/" + TASKS["piqa"][0]: b"\n"}
    found = open_bundle(str(make_folder(tmp_path, content)), tmp_path)
    assert [task.label for task in found.tasks] == ["copa"]
    assert (
        found.missing["winograd"]
        == "the bundle has no eval_data/language_understanding/winograd.jsonl"
    )
    assert found.missing["piqa"] == "eval_data/commonsense_reasoning/piqa.jsonl is empty"
    assert found.missing["squad"] == "core.yaml does not name it" and set(found.missing) == set(
        CORE_TASKS
    ) - {"copa"}
    with pytest.raises(CoreError, match="none of its 4 tasks is there"):
        Bundle(make_folder(tmp_path / "empty", files(())))


def test_a_bundle_may_bring_the_results_of_other_models(tmp_path: Path) -> None:
    content = files() | {
        "openai-community-gpt2.csv": b"Task, Accuracy, Centered\ncopa, 0.62, 0.24\nCORE, , 0.1139\n",
        "openai-community-gpt2-xl.csv": b"Task, Accuracy, Centered\ncopa, 0.7, no number\n",
    }
    assert Bundle(make_zip(tmp_path / "a.zip", content)).tables == {
        "gpt2": {"copa": 0.24, "CORE": 0.1139}
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            PAGE,
            "278 bytes that are no whole .zip of a bundle (a web or error page, it starts with b'<?xml version=",
        ),
        (b"", "0 bytes that are no whole .zip of a bundle"),
        (b"PK\x03\x04 cut", "8 bytes that are no whole .zip of a bundle (it starts with b'PK"),
    ],
)
def test_what_is_no_bundle_is_said_with_its_size_and_first_bytes(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "eval_bundle.zip"
    path.write_bytes(content)
    with pytest.raises(CoreError) as raised:
        open_bundle(str(path), tmp_path)
    assert said in str(raised.value) and str(path) in str(raised.value)


@pytest.mark.fault(43)
def test_a_damaged_task_is_found_when_the_bundle_is_opened(tmp_path: Path) -> None:
    name = "eval_data/" + TASKS["winograd"][0]
    with pytest.raises(
        CoreError, match=r"winograd.jsonl \(278 bytes\) line 1 is no .*it begins b'<\?xml"
    ):
        Bundle(make_folder(tmp_path / "page", files() | {name: PAGE}))
    path = make_zip(tmp_path / "flipped.zip")
    content = bytearray(path.read_bytes())
    content[content.index(b"context_options") + 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(CoreError, match=r"winograd.jsonl cannot be read \(BadZipFile: Bad CRC-32"):
        Bundle(path)
    with zipfile.ZipFile(
        tmp_path / "packed.zip", "w", zipfile.ZIP_DEFLATED
    ) as archive:  # as nanochat's is
        for part, one in files().items():
            archive.writestr(part, one)
        info = archive.getinfo(name)
    content = bytearray((tmp_path / "packed.zip").read_bytes())
    start = info.header_offset + 30 + len(name)
    content[start : start + 20] = b"\xff" * 20
    (tmp_path / "packed.zip").write_bytes(content)
    with pytest.raises(
        CoreError,
        match=rf"winograd.jsonl cannot be read \(error: Error -3 .*, in {len(content)} bytes "
        r"\(it starts with b'PK.*bring the bundle again",
    ):
        Bundle(tmp_path / "packed.zip")
    with pytest.raises(CoreError, match=r"has no core\.yaml, so that it is no bundle"):
        Bundle(make_folder(tmp_path / "no", {"eval_meta_data.csv": b"a"}))
    with pytest.raises(CoreError, match=r"CORE_BUNDLE=/not/there: is not there"):
        open_bundle("/not/there", tmp_path)


# ---- From a server


def test_it_is_downloaded_once(server: Server, tmp_path: Path) -> None:
    content = make_zip(tmp_path / "a.zip").read_bytes()
    server.served["a.zip"] = content, ""
    address = f"{server.url('a.zip')}@sha256:{sha256(content)}"
    found = open_bundle(address, tmp_path / "data")
    assert len(found.tasks) == 4 and found.path.parent == tmp_path / "data" / "core"
    assert open_bundle(address, tmp_path / "data").sha256 == found.sha256
    lock = found.path.with_name(".lock")
    lock.unlink()
    lock.mkdir()  # as where nothing can be written
    assert open_bundle(address, tmp_path / "data").sha256 == found.sha256
    lock.rmdir()
    assert server.asked == ["a.zip"]

    found.path.write_bytes(PAGE)  # damaged here: downloaded again
    assert open_bundle(address, tmp_path / "data").sha256 == found.sha256
    with pytest.raises(CoreError, match=r"an address needs its hash: https://HOST/PATH\.zip@sha"):
        open_bundle(server.url("a.zip"), tmp_path / "data")


@pytest.mark.fault(43)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("refused", "it answers 403 with b'<?xml"),
        ("page", "its hash is sha256:"),
        ("page", "in 278 bytes (a web or error page, it starts with b'<?xml"),
        ("busy", "it answers 503 with b'later'"),
        ("missing", "it answers 404 with b'gone'"),
        ("cut", ""),
        ("other", "not sha256:0000000000000000"),
    ],
)
def test_what_went_wrong_is_said_and_what_to_do(
    server: Server, tmp_path: Path, name: str, said: str
) -> None:
    content = make_zip(tmp_path / "a.zip").read_bytes()
    server.served |= {
        "refused": (PAGE, "403"),
        "page": (PAGE, ""),
        "busy": (b"later", "503"),
        "cut": (content, "always breaks"),
        "other": (content, ""),
    }
    with pytest.raises(CoreError) as raised:
        open_bundle(f"{server.url(name)}@sha256:{64 * '0'}", tmp_path / "data")
    assert f"/{name}: " in str(raised.value) and said in str(raised.value)
    assert "give its path as CORE_BUNDLE" in str(raised.value)
    assert server.asked.count("busy") in (0, hub.TRIES)
    assert [path.name for path in (tmp_path / "data" / "core").iterdir()] == [".lock"]


def test_what_breaks_off_is_downloaded_again(server: Server, tmp_path: Path) -> None:
    content = make_zip(tmp_path / "a.zip").read_bytes()
    server.served["a.zip"] = content, "breaks"
    path = open_bundle(f"{server.url('a.zip')}@sha256:{sha256(content)}", tmp_path / "data").path
    assert path.read_bytes() == content and server.asked == ["a.zip", "a.zip"]
