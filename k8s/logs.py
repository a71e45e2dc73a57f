"""make logs and make attach: of a pod while there is one, else of the files of its node, on the volume or here."""

import io
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path

from k8s.cluster import log_lines, overview
from k8s.cluster.kubectl import Refused
from k8s.cluster.target import (
    DATA,
    Target,
    Thing,
    container_of,
    index_of,
    name_of,
    newest,
    no_job,
    runs,
)
from k8s.cluster.volume import Volume, say
from k8s.cluster.where import Place
from k8s.cluster.words import trouble
from record import locks
from record.regular_file import open_regular
from record.run_paths import RunPaths
from settings.config import Config
from settings.resolve import show_path

POLL_S = 0.5
MOST_BYTES = 2**20  # of a log that are read at once

# Of the run's folder: the log of a node, else what else there is of it; and all logs, each behind its name. That of
# node 0 is the same as train.log. A node that is a site of its own has a folder of its own.
NODE_LOG = 'cd "$1" || exit 2; for f in "$2" "$3" "$4"; do [ -f "$f" ] && exec cat "$f"; done; echo "$2" >&2; exit 4'
ALL_LOGS = (
    'cd "$1" || exit 2; for f in train.log logs/node_[1-9]*.log logs/rank_*.log '
    'site_*/train.log site_*/logs/rank_*.log; do [ -f "$f" ] || continue; '
    'printf "==> %s <==\\n" "$f"; cat "$f"; done'
)


def show(found: Iterable[str], only: str) -> bool:
    """Print the lines that are asked for, as they come; returns whether there were any."""
    line = ""
    for line in log_lines.chosen(found, only):
        sys.stdout.write(line if line.endswith("\n") else line + "\n")
        sys.stdout.flush()
    return bool(line)


def say_no_errors(only: str, where: str) -> None:
    """Say that nothing was found, if errors were looked for. where: in whose log."""
    if only == "errors":
        say(f"No errors in {where}.")


# ---------------------------------------------------------------------------------------------------
# In the cluster
# ---------------------------------------------------------------------------------------------------


def of_cluster(place: Place, target: Target, follow: bool) -> int:
    """The log of the pod of an index, followed while it lives; of the volume where no pod is left. An exit code."""
    node, only = place.config.node_rank, place.config.only
    found = target.pods()
    other = overview.another_run(found[-1], place) if found else ""
    if not found and target.job() is None and target.job(DATA):
        say(
            f"Job {target.job_name} is not there; this is what {target.job_name}{DATA} says, the Job of make data"
        )
        found = target.pods(DATA)
    if other:  # whose log was asked for is clear, and the volume has it, however little of it: not those of its pods
        say(
            f"Job {target.job_name}: {overview.another(other, place)}; this is what the volume has of "
            f"{place.paths.name}"
        )
        found = []
    pods = [pod for pod in found if is_search(place) or index_of(pod) in (node, -1)]
    begun = [pod for pod in pods if set(container_of(pod)) & {"running", "terminated"}]
    if begun and is_search(place):
        return of_all_pods(target, newest(begun))
    if begun:
        return of_pod(target, begun[-1], only, follow)
    if pods:
        why = trouble(pods[-1]) or "its image is being fetched, or its volume mounted"
        raise Refused(
            69, f"pod {name_of(pods[-1])} has said nothing yet: {why}; make status shows all pods"
        )
    job = None if other else target.job()
    if job and node >= int(job["spec"].get("completions") or 1):
        raise Refused(
            64,
            f"NODE_RANK={node}: the Job has {job['spec']['completions']} pods, of 0 to "
            f"{int(job['spec']['completions']) - 1}",
        )
    try:
        with Volume(place, target) as volume:
            if not show(of_volume(volume, place), only):
                say_no_errors(only, f"the logs of run {place.paths.name} on the volume")
    except Refused as refused:
        raise (
            no_job(target) if job is None and "no such claim" in refused.sentence else refused
        ) from None
    return 0


def of_all_pods(target: Target, pods: list[Thing]) -> int:
    """The complaints of all pods, each behind its name: which one is the cause is not known before they are read."""
    unread: list[str] = []

    def said() -> Iterator[str]:
        for pod in pods:
            try:
                done = target.call("logs", name_of(pod), "-c", "trainer", timeout=300)
            except Refused as refused:  # it took too long: the others may be read
                unread.append(refused.sentence)
                continue
            yield f"==> {name_of(pod)} <==\n"
            yield from done.out.splitlines(keepends=True)
            if done.code:
                unread.append(
                    f"the log of pod {name_of(pod)} cannot be read ({done.complaint}); make status says how "
                    "it is"
                )

    any_shown = show(said(), "errors")
    if len(unread) == len(pods):
        raise Refused(69, unread[0])
    if not any_shown and not unread:
        say_no_errors("errors", f"the logs of {len(pods)} pods")
    for sentence in unread:
        say(sentence)
    return 0


def of_pod(target: Target, pod: Thing, only: str, follow: bool) -> int:
    """`kubectl logs` of a pod, filtered; Ctrl-C ends only the watching."""
    name = name_of(pod)
    command = ["logs", name, "-c", "trainer", *(["-f"] if follow and runs(pod) else [])]
    process = target.start(
        *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        any_shown = show(process.stdout, only)
        complaint = process.stderr.read().strip()
        if process.wait():
            raise Refused(
                69,
                f"the log of pod {name} cannot be read ({complaint}); make status says how it is, and "
                "once it is gone make logs reads the volume",
            )
        if not any_shown:
            say_no_errors(only, f"the log of pod {name}")
    finally:
        process.kill()
        process.wait()
    return 0


def of_volume(volume: Volume, place: Place) -> Iterator[str]:
    """The lines of a node's log on the volume; all logs where errors are looked for and no node was named."""
    if is_search(place):
        found = volume.ask("sh", "-c", ALL_LOGS, "sh", volume.folder, timeout=600)
        yield from found.splitlines(keepends=True)
        return
    node = place.config.node_rank
    done = volume.run(
        "sh",
        "-c",
        NODE_LOG,
        "sh",
        volume.folder,
        f"site_{node}/train.log",
        f"logs/node_{node}.log",
        "train.log" if node == 0 else f"console_node_{node}.log",
        timeout=600,
    )
    if done.code == 4:
        raise Refused(
            78,
            f"NODE_RANK={node}: run {place.paths.name} has no log of that node on the volume; it may never "
            "have begun. make status says what is known of it",
        )
    if done.code:
        raise volume.refused(done)
    yield from done.out.splitlines(keepends=True)


def is_search(place: Place) -> bool:
    """Whether errors are looked for and no node was named: in the logs of all."""
    return place.config.only == "errors" and "NODE_RANK" not in place.given


# ---------------------------------------------------------------------------------------------------
# On this machine
# ---------------------------------------------------------------------------------------------------


def of_here(place: Place, follow: bool) -> int:
    """The same of a run on this machine. An exit code."""
    paths, node = place.paths, node_of(place.config)
    if is_search(place):
        files = [
            paths.train_log,
            *sorted((paths.folder / "logs").glob("node_[1-9]*.log")),
            *sorted((paths.folder / "logs").glob("rank_*.log")),
        ]
        marked = (
            line
            for path in files
            if path.exists()
            for line in itertools.chain([f"==> {path.relative_to(paths.folder)} <==\n"], read(path))
        )
        if not show(marked, "errors"):
            say_no_errors("errors", f"the logs in {show_path(paths.folder)}")
        return 0
    own = paths.node_log(node)
    candidates = (
        [own, paths.train_log, paths.console_log]
        if node == 0
        else [own, RunPaths(paths.folder, node).console_log]
    )
    existing = [path for path in candidates if path.exists()]
    if not existing and not (follow and locks.has_job(paths)):
        raise Refused(
            78,
            f"NODE_RANK={place.config.node_rank}: run {paths.name} has no log of that node in {paths.folder}; it may never have "
            "begun, or have been on another machine",
        )
    lines = followed(candidates, paths) if follow else read(existing[0])
    if not show(lines, place.config.only):
        say_no_errors(place.config.only, show_path((existing or candidates)[0]))
    return 0


def node_of(config: Config) -> int:
    """Return the number of the node in the run's folder: at several sites each has a folder of its own. Commands that
    only look need no NODES; without it the number is that of the run."""
    if config.node_rank < config.nodes:
        return config.rank_in_site
    return config.node_rank


def open_log(path: Path) -> BufferedReader:
    try:
        return open_regular(path)
    except OSError as error:
        raise Refused(78, f"{show_path(path)}: cannot be read ({error.strerror})") from None


def read(path: Path) -> Iterator[str]:
    """Yield the lines of a log, a very long one in pieces."""
    with (
        open_log(path) as file,
        io.TextIOWrapper(file, encoding="utf-8", errors="replace") as text,
    ):
        while line := text.readline(MOST_BYTES):
            yield line


def followed(candidates: Sequence[Path], paths: RunPaths) -> Iterator[str]:
    """Yield the lines of the first of these files that exists, and those that are added, until the run is over.

    A job that prepares data has its console only. Once its trainer writes a log, that is followed.
    """
    path: Path | None = None
    position = 0
    while True:
        over = not locks.is_at_work(paths)
        first = next((each for each in candidates if each.exists()), None)
        if first != path:
            path, position = first, 0
        has_more = False
        if path:
            with open_log(path) as file:
                file.seek(position)
                content = file.read(MOST_BYTES)
            has_more = len(content) == MOST_BYTES
            shown = content.rfind(b"\n") + 1
            if has_more:
                shown = shown or len(content)  # a very long line in pieces
            elif over:
                shown = len(content)
            position += shown
            yield from io.StringIO(content[:shown].decode(errors="replace"), newline=None)
        if has_more:
            continue
        if over:
            return
        time.sleep(POLL_S)


def watching(show_it: Callable[[], int]) -> int:
    """An exit code. Ctrl-C ends the watching and nothing else."""
    try:
        return show_it()
    except KeyboardInterrupt:
        sys.stdout.write("\n")
    except BrokenPipeError:  # head, or a pager that was left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
