"""Which bytes: a source at a revision, as the list of its files in order, with sizes and hashes.

    DATA_DIR/NAME/pin-IDENTITY.json      the list; for a hub source made once: later commits there change nothing
                  hashes-IDENTITY.json   of local files: (size, mtime_ns) -> hash, so that they are hashed once

pin() is what prepares data: it asks the hub where there is no pin yet, and looks at local files each time.
pinned() is what reads prepared data: it reads the pin only.
"""

import dataclasses
import fnmatch
import functools
import json
import logging
import re
import shlex
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import xxhash

from record.durable import make_printable, write_whole
from settings.json_file import read_small
from train.data.sources.content import digest_of, format_of, read_start
from train.data.sources.given import drop_links, expand, find_path, list_files
from train.data.sources.hub import GO_ONLINE, NoNetwork, ask
from train.data.sources.source import CorpusError, Source, is_validation

log = logging.getLogger(__name__)

SCHEMA = 1
PATHS_A_QUESTION = 500  # files whose sizes the hub is asked for at once
LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
}  # of the standard library


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a source. name: as messages call it, the path in the repository or as it was given.

    digest: "sha256:..." or "git-sha1:..." as the hub keeps it, "xxh3:..." of a local one.
    """

    name: str
    bytes: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Pinned:
    """A source at a revision; the order of the files is that of the documents.

    held_out: the name of a document that is held out beside those that their hash chooses, of little text.
    """

    source: Source
    revision: str
    files: tuple[File, ...]
    held_out: str = ""

    @property
    def key(self) -> str:
        """The name of a folder with what is made from it."""
        choice = f"-{self.held_out[:8]}" if self.held_out else ""
        return f"{self.revision[:12]}-{self.source.identity}{choice}"

    def holds_out(self, name: str) -> bool:
        """Whether the document of that name is never trained on."""
        return name == self.held_out or is_validation(self.source, name)


def pin(
    s: Source,
    folder: Path,
    token: str = "",
    finish: Callable[[Pinned], Pinned] = lambda pinned: pinned,
) -> Pinned:
    """The source at its revision, written to `folder`; looked up where that was not done before.

    finish: what is done to the pin of local files before it is written.
    """
    path = pin_path(s, folder)
    if s.kind != "hub":
        made = finish(local_pin(s, folder))
    else:
        if path.exists():
            stored = read(s, path)
            if s.revision in ("", stored.revision):
                return stored
        made = hub_pin(s, token)
    text = text_of(made)
    if read_text(path) != text:
        write_whole(path, text.encode())
    return made


def pinned(s: Source, folder: Path) -> Pinned:
    """The source at the revision that was written when its data was prepared."""
    path = pin_path(s, folder)
    if not path.exists():
        argument = f" DATA={shlex.quote(s.place)}" if s.place else ""
        raise CorpusError(
            f"{path}: there is no such file: {s.name} has not been prepared with its current "
            f"declaration; prepare the data with: make data{argument}"
        )
    stored = read(s, path)
    if s.kind == "hub" and s.revision and s.revision != stored.revision:
        raise CorpusError(
            f"{path}: pins {s.name} at {stored.revision[:12]}, but its source says revision = "
            f"{s.revision[:12]}; prepare the data with: make data"
        )
    return stored


def pin_path(s: Source, folder: Path) -> Path:
    """Where the pin of a source is kept."""
    return folder / f"pin-{s.identity}.json"


def text_of(made: Pinned) -> str:
    """Return the pin as it is written."""
    content = {
        "schema": SCHEMA,
        "source": made.source.name,
        "identity": made.source.identity,
        "revision": made.revision,
        "files": [[file.name, file.bytes, file.digest] for file in made.files],
    }
    if made.held_out:
        content["held_out"] = made.held_out
    return json.dumps(content, indent=1) + "\n"


def read_text(path: Path) -> str:
    try:
        return read_small(path).decode()
    except (OSError, UnicodeDecodeError):
        return ""


def read(s: Source, path: Path) -> Pinned:
    """The pin in that file."""
    try:
        content: dict[str, Any] = json.loads(read_small(path))
        if content["schema"] != SCHEMA or content["identity"] != s.identity or not content["files"]:
            raise ValueError("of another schema or source")
        files = tuple(
            File(str(name), int(size), str(digest)) for name, size, digest in content["files"]
        )
        return Pinned(s, str(content["revision"]), files, str(content.get("held_out", "")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorpusError(
            f"{path}: not the pin of a source ({error!r}); delete it and run: make data"
        ) from None


# ---- On the hub


def hub_pin(s: Source, token: str) -> Pinned:
    """The data files of the source's config and split, at its revision or the current one. Asks the hub."""
    from huggingface_hub import HfApi, RepoFile

    api = HfApi(token=token or None)
    at = f" at {s.revision[:12]}" if s.revision else ""

    def list_files() -> tuple[str, list[str]]:
        revision = s.revision or str(api.dataset_info(s.repository, timeout=30).sha)
        return revision, data_files(s, revision, token)

    try:
        revision, names = ask(s.repository, f"the list of files of {s.repository}{at}", list_files)
    except NoNetwork:
        raise NoNetwork(
            f"Cannot list the files of {s.repository} on the Hub: no network. {GO_ONLINE}."
        ) from None
    facts: dict[str, File] = {}
    for start in range(0, len(names), PATHS_A_QUESTION):
        some = names[start : start + PATHS_A_QUESTION]
        answer = functools.partial(
            api.get_paths_info, s.repository, some, revision=revision, repo_type="dataset"
        )
        # a question each: the hub has a limit of time for one
        for info in ask(s.repository, f"the sizes of files of {s.repository}", answer):
            if isinstance(info, RepoFile) and info.lfs:
                facts[info.path] = File(info.path, info.lfs.size, f"sha256:{info.lfs.sha256}")
            elif isinstance(info, RepoFile):
                facts[info.path] = File(info.path, info.size, f"git-sha1:{info.blob_id}")
    if missing := [name for name in names if name not in facts]:
        raise CorpusError(
            f"the hub lists {missing[0]} of {s.repository}, but gives no size of it; run the same "
            "command again"
        )
    return Pinned(s, revision, tuple(facts[name] for name in names))


def data_files(s: Source, revision: str, token: str) -> list[str]:
    """Paths in the repository, sorted: what `datasets` would read for the config and split."""
    import datasets

    with (
        tempfile.TemporaryDirectory() as empty
    ):  # with a cache, what cannot be reached is taken from there unasked
        try:
            builder = datasets.load_dataset_builder(
                s.repository, s.config, revision=revision, token=token or None, cache_dir=empty
            )
        except ValueError as error:
            if configs := re.search(r"[Aa]vailable(?: configs)?: \[(.*?)\]", str(error)):
                is_wrong = f"has no config {s.config}" if s.config else "has several configs"
                raise CorpusError(
                    f"{s.repository} {is_wrong}; there are: {configs[1]}. {s.remedies['config']}."
                ) from None
            raise
    splits = {str(split): files for split, files in (builder.config.data_files or {}).items()}
    if s.split not in splits:
        raise CorpusError(
            f"{s.repository}{f', config {s.config},' if s.config else ''} has no split {s.split}; there "
            f"are: {', '.join(sorted(splits)) or 'none'}. {s.remedies['split']}."
        )
    start = f"hf://datasets/{s.repository}@{revision}/"
    if foreign := [name for name in splits[s.split] if not name.startswith(start)]:
        raise CorpusError(
            f"{s.repository} keeps its data elsewhere ({foreign[0]}), where no commit fixes them; "
            "download them and declare them as files"
        )
    return sorted(name.removeprefix(start) for name in splits[s.split])


# ---- Here


def local_pin(s: Source, folder: Path) -> Pinned:
    """Return the files as they are now."""
    if s.kind == "stdlib":
        files = hashed(s, stdlib_names(s.leave_out), folder)
        return Pinned(s, ".".join(map(str, sys.version_info[:3])), files)
    names = list_given(s) if s.place else expanded(s)
    chosen = drop_copies(s, hashed(s, sorted(names), folder))
    decides: list[Any] = [dataclasses.astuple(file) for file in chosen]
    for file in chosen:
        kind = read_start(find_path(file.name), file.name).kind
        # A file that is what its name says decides nothing more.
        if kind != (format_of(file.name) or "text"):
            decides.append([file.name, kind])
    content = xxhash.xxh3_128(json.dumps(decides).encode())
    return Pinned(s, f"local-{content.hexdigest()}", chosen)


def list_given(s: Source) -> list[str]:
    """List the files that DATA names, and log what is left out."""
    names, left_out = list_files(s.place)
    if left_out:
        most = left_out.most_common(5)
        log.warning(
            "DATA=%s: left out files that are no data (%d): %s",
            make_printable(s.place),
            left_out.total(),
            ", ".join(f"{number} {make_printable(kind)}" for kind, number in most),
        )
    return names


def drop_copies(s: Source, files: Sequence[File]) -> tuple[File, ...]:
    """Return the files without those that are equal to an earlier one: text counts once. Log how many these are."""
    first: dict[str, File] = {}
    copies = [file for file in files if first.setdefault(file.digest, file) is not file]
    if copies:
        log.warning(
            "%s: left out copies of other files (%d), for example %s, which equals %s",
            s.name,
            len(copies),
            make_printable(copies[0].name),
            make_printable(first[copies[0].digest].name),
        )
    return tuple(first.values())


def expanded(s: Source) -> list[str]:
    """Return the names of the files that the patterns of a source match, sorted, each as it was given.

    A file that several links lead to is taken once, by the first name.
    """
    names: set[str] = set()
    for pattern in s.files:
        matches = [name for name in expand(pattern) if find_path(name).is_file()]
        if not matches:
            raise CorpusError(
                f"{s.name}: no file matches {pattern!r} (looked for {find_path(pattern)}); check files in "
                "the declaration of the source"
            )
        names.update(matches)
    return drop_links(sorted(names))


def local_path(s: Source, name: str) -> Path:
    """Where a file lies that the pin of a source here names."""
    return stdlib_root() / name if s.kind == "stdlib" else find_path(name)


def hashed(s: Source, names: list[str], folder: Path) -> tuple[File, ...]:
    """Files with size and hash; those whose size and time are as in `folder`'s cache are not read again."""
    cache = folder / f"hashes-{s.identity}.json"
    try:
        known = {name: list(entry) for name, entry in json.loads(read_text(cache) or "{}").items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        known = {}
    files = []
    now = {}
    for name in names:
        path = local_path(s, name)
        try:
            facts = path.stat()
            stamp = [facts.st_size, facts.st_mtime_ns]
            entry = known.get(name, [])
            digest = entry[2] if entry[:2] == stamp else digest_of(path, "xxh3")
        except OSError as error:
            raise CorpusError(
                f"{name}: cannot be read ({error.strerror}); make it readable, or leave it out of the "
                "source's files"
            ) from None
        files.append(File(name, facts.st_size, digest))
        now[name] = [*stamp, digest]
    if now != known:
        write_whole(cache, json.dumps(now).encode())
    return tuple(files)


def stdlib_root() -> Path:
    """Where the running interpreter has its standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_names(leave_out: Sequence[str] = ()) -> list[str]:
    """The Python source of the running interpreter's standard library, by file name; without tests and packages.

    leave_out: patterns of names.
    """
    root = stdlib_root()
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not LEFT_OUT & set(path.relative_to(root).parts)
    )
    if not names:
        raise CorpusError(
            f"{root} holds no Python source: this interpreter has its standard library in an archive; "
            "use another Python, or another source in DATA_MIX"
        )
    return [name for name in names if not any(fnmatch.fnmatch(name, each) for each in leave_out)]
