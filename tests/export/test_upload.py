"""make upload: what the Hub then has is the export, byte for byte; and each way in which it can fail says what to do."""

import hashlib
import os
import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http

from export import place, upload
from tests.export.upload_hub import COMMIT, PART, TOKEN, UploadHub, upload_hub
from train.data.sources import hub as hub_client

REPO = "me/tiny"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with an export of small and large files, and a page."""
    export = tmp_path / "a-run" / "export"
    export.mkdir(parents=True)
    (export / "README.md").write_text("---\ntags: []\n---\n| steps | 1,200 |\n")
    (export / "config.json").write_text("{}")
    (export / "model-00001-of-00002.safetensors").write_bytes(os.urandom(3 * PART + 5))
    (export / "model-00002-of-00002.safetensors").write_bytes(os.urandom(100))
    place.seal(export, {})
    (tmp_path / "a-run" / "plots").mkdir()
    (tmp_path / "a-run" / "plots" / "loss_curves.html").write_text("<html>")
    return export


@pytest.fixture(autouse=True)
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave huggingface_hub as it was, and let no pause take time."""
    monkeypatch.setattr(_http, "_GLOBAL_CLIENT_FACTORY", _http._GLOBAL_CLIENT_FACTORY)
    monkeypatch.setattr(_http, "_GLOBAL_CLIENT", None)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    hub_client.take_over.cache_clear()
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(hub_client, "TOTAL_S", 5)


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, hub: UploadHub | None, **given: str) -> int:
    """Return the exit code of make upload."""
    if hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    empty = folder.parent / "empty.env"
    empty.touch()
    settings = {
        "ENV_FILE": str(empty),
        "RUNS_DIR": str(folder.parents[1]),
        "RUN_NAME": "a-run",
        "HUB_REPO": REPO,
        "HF_TOKEN": TOKEN,
    }
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]} | settings | given)
    return upload.main()


def contents(folder: Path) -> dict[str, bytes]:
    page = folder.parent / "plots" / "loss_curves.html"
    return {path.name: path.read_bytes() for path in [*folder.iterdir(), page]}


def test_the_hub_has_the_export_and_the_page_and_nothing_is_sent_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with upload_hub(REPO) as hub:
        hub.target.files["model.safetensors"] = b"of an older export"
        hub.target.files["model.gguf"] = b"also"
        hub.target.files["LICENSE"] = b"mine"
        assert run(folder, monkeypatch, hub) == 0
        assert hub.target.files == contents(folder) | {".gitattributes": b"", "LICENSE": b"mine"}
        assert hub.created == [{"name": "tiny", "organization": "me", "visibility": "private"}]
        assert hub.messages == ["a-run"]
        assert hub.requests.count("put") == 5
        assert capsys.readouterr().out.endswith(f"Done: {hub.url}/{REPO}/commit/{COMMIT}\n")

        (folder / "notes.txt").write_text("private")
        assert run(folder, monkeypatch, hub) == 0
        assert hub.requests.count("put") == 5
        assert "notes.txt" not in hub.target.files
        assert "SHA256SUMS does not name it: notes.txt" in capsys.readouterr().out


@pytest.mark.parametrize(
    "manner",
    [
        "500 create",
        "408 create",
        "500 preupload",
        "429 batch",
        "503 put",
        "closed put",
        "500 commit",
        "closed commit",
    ],
)
def test_what_fails_for_a_moment_is_sent_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, manner: str
) -> None:
    with upload_hub(REPO, manner, bad_times=2) as hub:
        assert run(folder, monkeypatch, hub) == 0
        assert hub.target.bad_times < 1
        assert hub.target.files == contents(folder) | {".gitattributes": b""}


def test_a_lost_connection_ends_and_the_same_command_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with upload_hub(REPO, "closed put") as hub:
        first = (folder / "model-00001-of-00002.safetensors").read_bytes()
        hub.store[hashlib.sha256(first).hexdigest()] = first
        assert run(folder, monkeypatch, hub) == 78
        said = capsys.readouterr().err
        assert said.startswith(
            "The Hub does not accept model-00002-of-00002.safetensors: the connection was lost"
        )
        assert said.endswith("check the network, and run the same command again later\n")
        assert said.count("\n") == 1 and not hub.messages
        hub.target.manner = "good"
        hub.requests.clear()
        assert run(folder, monkeypatch, hub) == 0
        assert hub.requests.count("put") == 1
        assert hub.target.files == contents(folder) | {".gitattributes": b""}


def test_a_silent_connection_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upload, "SILENCE_S", 2.0)
    with upload_hub(REPO, "silent commit", bad_times=1) as hub:
        assert run(folder, monkeypatch, hub) == 0
        assert hub.requests.count("commit") == 2
    assert "the commit: the connection was lost (ReadTimeout" in caplog.text


def test_a_hub_that_asks_to_wait_too_long_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with upload_hub(REPO, "429 batch") as hub:
        hub.target.retry_after = 3600
        assert run(folder, monkeypatch, hub) == 78
        assert hub.requests.count("batch") == 1
    assert (
        "safetensors: it answers 429, and it asks to wait 3600 s; asked 1 times"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("manner", "given", "said"),
    [
        (
            "401 create",
            {},
            f"The Hub refuses {REPO} (401). Check HUB_REPO={REPO}, and set HF_TOKEN to a token",
        ),
        (
            "403 commit",
            {},
            f"The Hub refuses the commit (403). Check HUB_REPO={REPO}, and set HF_TOKEN",
        ),
        ("403 put", {}, "The Hub refuses model-00001-of-00002.safetensors (403). Check"),
        ("400 commit", {}, "The Hub refuses the commit: BadRequestError"),
        ("good", {"HF_TOKEN": "hf_another"}, f"The Hub refuses {REPO} (401)."),
    ],
)
def test_what_the_hub_refuses_is_asked_once(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    manner: str,
    given: dict[str, str],
    said: str,
) -> None:
    with upload_hub(REPO, manner) as hub:
        assert run(folder, monkeypatch, hub, **given) == 78
        assert hub.requests.count(manner.partition(" ")[2]) == (manner != "good")
        assert not hub.messages
    output = capsys.readouterr()
    assert output.err.startswith(said) and output.err.count("\n") == 1
    assert "trying again" not in output.out and TOKEN not in output.out + output.err


def test_a_file_that_the_repository_ignores_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with upload_hub(REPO) as hub:
        hub.ignored = "config.json"
        assert run(folder, monkeypatch, hub) == 78
    assert (
        ": config.json is not there as it is here. Look for a .gitignore" in capsys.readouterr().err
    )


def test_a_dry_run_lists_the_files_and_asks_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with upload_hub(REPO) as hub:
        assert run(folder, monkeypatch, hub, DRY_RUN="1", HF_TOKEN="") == 0
        assert not hub.requests
    said = capsys.readouterr().out
    sizes = {name: len(content) for name, content in contents(folder).items()}
    assert all(f"{size:,}  {name}\n" in said for name, size in sizes.items())
    assert f"{sum(sizes.values()):,}  bytes to {hub.url}/{REPO} (private if it is new)" in said


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ({"HUB_REPO": ""}, 64, "HUB_REPO: Set the repository, for example HUB_REPO=my-name/tiny."),
        ({"HUB_REPO": "tiny"}, 64, "OWNER/NAME of at most 96 letters"),
        ({"HUB_REPO": "me/a--b"}, 64, "OWNER/NAME of at most 96 letters"),
        ({"HF_TOKEN": ""}, 64, "HF_TOKEN: Set a token that may write."),
        ({"RUN_NAME": "other"}, 78, "other: There is no export. Run `make export RUN"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_sent(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: dict[str, str],
    code: int,
    said: str,
) -> None:
    assert run(folder, monkeypatch, None, **given) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["changed", "deleted"])
def test_an_export_that_is_not_whole_is_not_published(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    path = folder / "config.json"
    path.write_text("[]") if damage == "changed" else path.unlink()
    assert run(folder, monkeypatch, None) == 78
    said = capsys.readouterr().err
    assert "export/config.json: Is not what SHA256SUMS says. To publish your own version" in said


@pytest.mark.parametrize("kind", ["absolute", "above", "link"])
def test_nothing_from_outside_the_export_is_published(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    secret = folder.parents[1] / "secret.txt"
    secret.write_text("secret")
    names = {"absolute": str(secret), "above": "../../secret.txt", "link": "secret\x1b.txt"}
    if kind == "link":
        (folder / names[kind]).symlink_to(secret)
    with open(folder / "SHA256SUMS", "a") as file:
        file.write(f"{hashlib.sha256(b'secret').hexdigest()}  {names[kind]}\n")
    with upload_hub(REPO) as hub:
        assert run(folder, monkeypatch, hub) == 78
        assert not hub.requests and not hub.store
    said = capsys.readouterr().err
    assert "which is no file of the export. Remove that line" in said and "\x1b" not in said


@pytest.mark.parametrize("error", [KeyError("commitUrl"), StopIteration(0), TypeError("None")])
def test_an_answer_that_makes_no_sense_is_told_without_names_of_python(error: Exception) -> None:
    with pytest.raises(upload.UploadError, match=r"refuses it: its answer cannot be read\."):
        upload.describe(error, REPO, "it")
