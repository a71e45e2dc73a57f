"""make upload: the export of RUN_NAME, with its card and the run's page, to HUB_REPO on the Hugging Face Hub.

    runs/RUN_NAME/export, checked -> repository, private if it is new -> file after file -> one commit -> compared

Until the commit nobody sees any of it. A file that the Hub has already is not sent again, so after a lost connection
the same command goes on.

Exit codes: 0; 64 a setting is invalid; 78 there is no whole export, or the Hub does not take it; 130 by Ctrl-C.
"""

import hashlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import huggingface_hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.hf_api import RepoFile

from export import place
from export.export_command import STOPPED, say
from export.weight_files import sha256_of
from record.durable import make_printable
from record.exit_codes import BAD_DATA, DONE
from record.run_paths import RunPaths
from settings import ROOT, ExpectedError, SettingsError, explain_error, load_config
from settings.config import Config
from settings.resolve import name_run, show_path
from settings.terminal import complain
from train.console import start_logging
from train.data.sources.hub import REFUSED, Again, Late, ask_until, causes

WEIGHTS = re.compile(r"model(-.*)?\.safetensors(\.index\.json)?|model\.gguf")
SILENCE_S = 60.0  # a connection on which nothing moves for so long is given up
T = TypeVar("T")


class UploadError(ExpectedError):
    """An export that cannot be published; the message says what to do."""


def find_files(paths: RunPaths) -> dict[str, Path]:
    """Return name in the repository -> file, once the export is what SHA256SUMS says. Raises UploadError."""
    folder = paths.folder / "export"
    remedy = f"Run `make export {name_run(paths.folder)}`."
    sums = place.read_sums(folder)
    if not sums:
        raise UploadError(f"{paths.name}: There is no export. {remedy}")
    files = {name: folder / name for name in sums}
    for name, path in files.items():
        if path.parent != folder or path.name != name or path.is_symlink():
            raise UploadError(
                f"{show_path(folder / place.SUMS)}: Names {name}, which is no file of the export. "
                f"Remove that line. Or: {remedy}"
            )
        if not path.is_file() or sha256_of(path) != sums[name]:
            raise UploadError(
                f"{show_path(path)}: Is not what SHA256SUMS says. To publish your own version, put the "
                f"hash that `sha256sum {name}` prints into SHA256SUMS. To go back, delete {name}. {remedy}"
            )
    files[place.SUMS] = folder / place.SUMS
    others = [path.name for path in folder.iterdir() if path.name not in files]
    if others:
        names = make_printable(", ".join(sorted(others)))
        say(f"Left out, because SHA256SUMS does not name it: {names}")
    page = paths.plots / "loss_curves.html"
    if page.is_file():
        files[page.name] = page
    return files


def upload(config: Config, files: dict[str, Path], message: str) -> str:
    """Publish the files in one commit, and compare them with what the Hub then has.

    Returns the page of the commit. Raises UploadError.
    """
    constants.HF_HUB_DISABLE_XET = True  # xet has retries and time-outs of its own
    api = HfApi(token=config.hf_token or None)
    repo = config.hub_repo
    ask(repo, repo, lambda: api.create_repo(repo, private=True, exist_ok=True))
    names = ask(repo, "a look at its files", lambda: api.list_repo_files(repo))
    additions = [CommitOperationAdd(name, path) for name, path in files.items()]
    for added in additions:
        send = lambda: api.preupload_lfs_files(repo, [added], free_memory=False)  # noqa: B023, E731
        ask(repo, added.path_in_repo, send)
        say(f"  sent {added.path_in_repo}")
    # Readers would take the weights of an older export, in more or fewer files, for this one's.
    old = [name for name in names if WEIGHTS.fullmatch(name) and name not in files]
    changes: list[Any] = [*additions, *map(CommitOperationDelete, old)]
    commit = ask(
        repo, "the commit", lambda: api.create_commit(repo, changes, commit_message=message)
    )
    find = lambda: api.get_paths_info(repo, list(files), revision=commit.oid)  # noqa: E731
    found = {entry.path: entry for entry in ask(repo, "a look at its files", find)}
    wrong = [name for name, path in files.items() if not is_same(path, found.get(name))]
    if wrong:
        raise UploadError(
            f"{commit.commit_url}: {', '.join(wrong)} is not there as it is here. Look for a .gitignore "
            "in the repository that leaves it out, and run the same command again."
        )
    return str(commit.commit_url)


def is_same(path: Path, entry: Any) -> bool:
    """Tell whether the Hub has the bytes of a file, by its hash: sha256 of a file in LFS, else git's."""
    if not isinstance(entry, RepoFile):
        return False
    if entry.lfs:
        return entry.lfs.sha256 == sha256_of(path)
    content = path.read_bytes()
    return entry.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def ask(repo: str, what: str, request: Callable[[], T]) -> T:
    """Return what request() returns. A failure that may pass is tried again. Raises CorpusError and UploadError."""

    def judge(error: Exception) -> tuple[str, float]:
        return describe(error, repo, what)

    return ask_until(f"The Hub does not take {what}", request, judge, SILENCE_S)


def describe(error: Exception, repo: str, what: str) -> tuple[str, float]:
    """Return a failure that may pass, and how many seconds the Hub asks to wait.

    Raises UploadError for any other.
    """
    problem = "its answer cannot be read. Run the same command again later"
    for cause in causes(error):
        words = " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
        if isinstance(cause, (Again, Late)):
            return str(cause), getattr(cause, "after_s", 0.0)
        if isinstance(cause, httpx2.TransportError):
            return f"the connection was lost ({words})", 0
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status in REFUSED:
            raise UploadError(
                f"The Hub refuses {what} ({status}). Check HUB_REPO={repo}, and set HF_TOKEN to a "
                "token that may write to it: https://huggingface.co/settings/tokens"
            )
        if status is not None or isinstance(cause, (OSError, ValueError)):
            problem = words
            break
    raise UploadError(f"The Hub refuses {what}: {problem}")


def run(config: Config) -> None:
    """Upload what the settings name, or print it. Raises SettingsError, UploadError and OSError."""
    repo = config.hub_repo
    if not repo:
        raise SettingsError(["HUB_REPO: Set the repository, for example HUB_REPO=my-name/tiny."])
    paths = RunPaths.of(config.runs_dir, config.run_name, ROOT)
    files = find_files(paths)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    for name, size in sizes.items():
        say(f"{size:>16,}  {name}")
    say(f"{sum(sizes.values()):>16,}  bytes to {constants.ENDPOINT}/{repo} (private if it is new)")
    if config.dry_run:
        say("DRY_RUN=1: nothing was sent.")
        return
    if not (config.hf_token or huggingface_hub.get_token()):
        url = "https://huggingface.co/settings/tokens"
        raise SettingsError([f"HF_TOKEN: Set a token that may write. Create one at {url}."])
    say(f"Done: {upload(config, files, config.run_name)}")


def main() -> int:
    start_logging()
    try:
        run(load_config())
    except SettingsError as error:
        complain(explain_error(error))
        return error.exit_code
    except ExpectedError as error:
        complain(make_printable(error))
        return error.exit_code
    except OSError as error:
        complain(f"{error.filename}: Cannot be read ({error.strerror}).")
        return BAD_DATA
    except KeyboardInterrupt:
        complain("Stopped. Run the same command to resume.")
        return STOPPED
    return DONE


if __name__ == "__main__":
    sys.exit(main())
