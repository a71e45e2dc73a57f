"""`make upload`: the export of RUN_NAME, with its card and the run's page, to HUB_REPO on the Hugging Face Hub.

    runs/RUN_NAME/export, checked -> repository, private if it is new -> file after file -> one commit -> compared

Nobody sees any of it before the commit. A file that the Hub has already is not sent again, so after a lost
connection the same command resumes. Exit codes: those of export_command.py.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx2
import huggingface_hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants

from export import place
from export.export_command import run_command
from export.weight_files import has_hash_of, sha256_of
from record.durable import make_printable
from record.run_paths import RunPaths
from settings import ROOT, ExpectedError, SettingsError, load_config
from settings.config import Config
from settings.resolve import name_run, show_path
from settings.terminal import say
from train.console import start_logging
from train.data.sources.hub import REFUSED, Again, Late, ask_until, causes

WEIGHTS = re.compile(r"model(-.*)?\.safetensors(\.index\.json)?|model\.gguf")
TOKENS = "https://huggingface.co/settings/tokens"
SILENCE_S = 60.0  # a connection on which nothing moves for so long is given up
T = TypeVar("T")


class UploadError(ExpectedError):
    """An export that cannot be published. The message says what to do."""


def find_files(paths: RunPaths) -> dict[str, Path]:
    """Return name in the repository -> file. Raises UploadError if the export is not what SHA256SUMS says."""
    folder = paths.folder / "export"
    remedy = f"Run `make export {name_run(paths.folder)}`."
    sums = place.read_sums(folder)
    if not sums:
        raise UploadError(f"{paths.name}: There is no export. {remedy}")
    for name, digest in sums.items():
        path = folder / name
        if path.name != name or path.is_symlink():
            raise UploadError(
                f"{show_path(folder / place.SUMS)}: Names {make_printable(name)}, which is no file of the "
                f"export. Remove that line. Or: {remedy}"
            )
        if not path.is_file() or sha256_of(path) != digest:
            raise UploadError(
                f"{show_path(path)}: Is not what SHA256SUMS says. To publish your own version, put the "
                f"hash that `sha256sum {name}` prints into SHA256SUMS. To go back, delete {name}. {remedy}"
            )
    files = {name: folder / name for name in [*sums, place.SUMS]}
    others = sorted(path.name for path in folder.iterdir() if path.name not in files)
    if others:
        names = make_printable(", ".join(others))
        say(f"Left out, because SHA256SUMS does not name it: {names}")
    page = paths.plots / "loss_curves.html"
    if page.is_file():
        files[page.name] = page
    return files


def upload(config: Config, files: dict[str, Path]) -> str:
    """Publish the files in one commit, and compare them with what the Hub has then.

    Returns the page of the commit. Raises UploadError.
    """
    constants.HF_HUB_DISABLE_XET = True  # xet has retries and time-outs of its own
    api = HfApi(token=config.hf_token or None)
    repo = config.hub_repo
    ask(repo, repo, lambda: api.create_repo(repo, private=True, exist_ok=True))
    names = ask(repo, "a list of its files", lambda: api.list_repo_files(repo))
    changes: list[CommitOperationAdd | CommitOperationDelete] = []
    for name, path in files.items():
        added = CommitOperationAdd(name, path)
        send = lambda: api.preupload_lfs_files(repo, [added], free_memory=False)  # noqa: B023, E731
        ask(repo, name, send)
        say(f"  sent {name}")
        changes.append(added)
    for name in names:
        # Readers would load the weights of an older export, in more or fewer files, instead.
        if WEIGHTS.fullmatch(name) and name not in files:
            changes.append(CommitOperationDelete(name))
    commit = ask(
        repo,
        "the commit",
        lambda: api.create_commit(repo, changes, commit_message=config.run_name),
    )
    entries = ask(
        repo,
        "a list of its files",
        lambda: api.get_paths_info(repo, list(files), revision=commit.oid),
    )
    same = [entry.path for entry in entries if has_hash_of(files[entry.path], entry)]
    wrong = [name for name in files if name not in same]
    if wrong:
        raise UploadError(
            f"{commit.commit_url}: {', '.join(wrong)} is not there as it is here. Look for a .gitignore "
            "in the repository that leaves it out, and run the same command again."
        )
    return str(commit.commit_url)


def ask(repo: str, what: str, request: Callable[[], T]) -> T:
    """Return what request() returns. A failure that may pass is tried again. Raises CorpusError and UploadError."""

    def judge(error: Exception) -> tuple[str, float]:
        return describe(error, repo, what)

    return ask_until(f"The Hub does not accept {what}", request, judge, SILENCE_S)


def describe(error: Exception, repo: str, what: str) -> tuple[str, float]:
    """Return a failure that may pass, and how many seconds the Hub asks to wait.

    Raises UploadError for any other.
    """
    problem = "its answer cannot be read. Run the same command again later"
    for cause in causes(error):
        words = make_printable(" ".join(f"{type(cause).__name__}: {cause}".split())[:300])
        if isinstance(cause, (Again, Late)):
            return str(cause), getattr(cause, "after_s", 0.0)
        if isinstance(cause, httpx2.TransportError):
            return f"the connection was lost ({words})", 0
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status in REFUSED:
            raise UploadError(
                f"The Hub refuses {what} ({status}). Check HUB_REPO={repo}, and set HF_TOKEN to a "
                f"token that may write to it: {TOKENS}"
            )
        if isinstance(cause, (OSError, ValueError)):
            problem = words
            break
    raise UploadError(f"The Hub refuses {what}: {problem}")


def run(config: Config) -> None:
    """Upload what the settings name, or list it. Raises ExpectedError, OSError."""
    repo = config.hub_repo
    if not repo:
        raise SettingsError(["HUB_REPO: Set the repository, for example HUB_REPO=my-name/tiny."])
    files = find_files(RunPaths.of(config.runs_dir, config.run_name, ROOT))
    sizes = {name: path.stat().st_size for name, path in files.items()}
    for name, size in sizes.items():
        say(f"{size:>16,}  {name}")
    say(f"{sum(sizes.values()):>16,}  bytes to {constants.ENDPOINT}/{repo} (private if it is new)")
    if config.dry_run:
        say("DRY_RUN=1: nothing was sent.")
        return
    if not (config.hf_token or huggingface_hub.get_token()):
        raise SettingsError([f"HF_TOKEN: Set a token that may write. Create one at {TOKENS}."])
    say(f"Done: {upload(config, files)}")


def main() -> int:
    start_logging()
    return run_command(lambda: run(load_config()), "Stopped. Run the same command to resume.")


if __name__ == "__main__":
    sys.exit(main())
