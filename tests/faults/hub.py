"""A stand-in for the Hugging Face hub on the loopback interface: data sets and a tokenizer, served well or badly.

HF_ENDPOINT leads the hub's own client here, so that its requests, retries and time-outs are the real ones.

A manner is what is answered and to which question: "403 about" to those about the data set, "short file" to those for
its files. It is "good" again after `bad_times` bad answers.
"""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
import urllib.parse
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from settings import ROOT

REPOSITORY = "GBaker/MedQA-USMLE-4-options"
REVISION = "0123456789abcdef" * 2 + "01234567"
PAGE = b"<!DOCTYPE html><html><title>Sign in to the campus network</title></html>"
LFS_SUFFIXES = (
    ".parquet",
    ".gz",
    ".zst",
    ".arrow",
    ".safetensors",
)  # what the hub keeps by its sha256


@dataclass
class Repository:
    """A data set and the manner in which it is served. requests: how often each of its paths was asked for."""

    files: dict[str, bytes]
    manner: str = "good"
    bad_times: int = 1000
    retry_after: int | None = None
    requests: list[str] = field(default_factory=list)


class Hub(http.server.ThreadingHTTPServer):
    """manner: how the files are answered; `bad_times` says how often, then all is well."""

    daemon_threads = True

    def __init__(self, repositories):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.requests = repositories, list[str]()
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def environment(self, folder):
        """What leads the hub's client here, with a cache of its own."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
        }

    def run(self, folder, code, *arguments):
        """Run Python in a process whose hub is this one; returns what it printed as JSON, and its log."""
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=ROOT,
            env=os.environ | self.environment(folder),
            text=True,
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        return json.loads(done.stdout), done.stderr


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urllib.parse.urlsplit(self.path)
        path, query = urllib.parse.unquote(url.path).strip("/"), urllib.parse.parse_qs(url.query)
        found = next(
            (name for name in self.server.repositories if f"/{name}/" in f"/{path}/"), None
        )
        line = f"{self.command} {self.path.split('?')[0]}"
        with self.server.lock:
            self.server.requests.append(line)
            if found:
                self.server.repositories[found].requests.append(line)
        if found is None:
            return self.send(
                404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}
            )
        self.repository = self.server.repositories[found]
        rest = f"/{path}/".partition(f"/{found}/")[2].strip("/")
        kind, _, rest = rest.partition("/")
        if kind in ("", "revision"):
            return self.about(
                {
                    "id": found,
                    "sha": REVISION,
                    "private": False,
                    "gated": False,
                    "tags": [],
                    "siblings": [{"rfilename": name} for name in self.repository.files],
                }
            )
        rest = rest.partition("/")[2]  # behind the revision
        if kind == "tree":
            return self.about(
                self.tree(rest, recursive="true" in str(query.get("recursive", "")).lower())
            )
        if kind == "paths-info":
            wanted = urllib.parse.parse_qs(self.body.decode()).get("paths", [])
            return self.about(
                [self.entry(name) for name in wanted if name in self.repository.files]
            )
        if kind == "resolve" and rest in self.repository.files:
            return self.file(self.repository.files[rest], self.entry(rest))
        self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_POST = do_GET

    def entry(self, name):
        """A file as the hub describes it, with true sizes and hashes."""
        content = self.repository.files[name]
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry = {"type": "file", "path": name, "size": len(content), "oid": blob}
        if name.endswith(LFS_SUFFIXES):
            entry["lfs"] = {
                "oid": hashlib.sha256(content).hexdigest(),
                "size": len(content),
                "pointerSize": 130,
            }
        return entry

    def tree(self, under, recursive):
        """What lies in a folder of the repository."""
        start = f"{under}/" if under else ""
        names = [name for name in self.repository.files if name.startswith(start)]
        files = [name for name in names if recursive or "/" not in name.removeprefix(start)]
        folders = {
            start + name.removeprefix(start).split("/")[0] for name in names if name not in files
        }
        return [
            {"type": "directory", "path": name, "oid": "0" * 40} for name in sorted(folders)
        ] + [self.entry(name) for name in files]

    def about(self, content):
        self.misbehave(
            json.dumps(content).encode(), {"Content-Type": "application/json"}, at="about"
        )

    def file(self, content, entry):
        etag = entry.get("lfs", entry)["oid"]
        self.misbehave(
            content,
            {
                "ETag": f'"{etag}"',
                "X-Repo-Commit": REVISION,
                "Accept-Ranges": "bytes",
                "Content-Type": "application/octet-stream",
            },
            at="file",
        )

    def is_bad(self, at):
        """Whether this answer is to be a bad one; a file is bad when it is read, or asked for its size by "head"."""
        if self.repository.manner.partition(" ")[2] != (
            f"head {at}" if self.command == "HEAD" else at
        ):
            return False
        with self.server.lock:
            self.repository.bad_times -= 1
            return self.repository.bad_times >= 0

    def misbehave(self, content, headers, at):
        """Answer, well or in the repository's manner."""
        if not self.is_bad(at):
            return self.send(200, content, headers)
        manner = self.repository.manner.partition(" ")[0]
        if manner.isdigit():
            after = self.repository.retry_after
            return self.send(
                int(manner),
                b'{"error": "no"}',
                {"Content-Type": "application/json"}
                | ({} if after is None else {"Retry-After": str(after)}),
            )
        if manner == "gated":
            return self.send(403, b'{"error": "gated"}', {"X-Error-Code": "GatedRepo"})
        if manner == "page":  # as a captive portal does: somewhere else, and with code 200
            return self.send(200, PAGE, {"Content-Type": "text/html"})
        if manner == "wrong":
            return self.send(200, bytes(byte ^ 1 for byte in content), headers)
        if manner == "slow":
            time.sleep(3)
            return self.send(200, content, headers)
        if manner == "short":
            self.close_connection = True
            return self.send(
                200, content[: len(content) // 2], headers | {"Content-Length": str(len(content))}
            )
        if manner == "hangs":
            time.sleep(600)
        raise AssertionError(f"no such manner: {manner}")

    def send(self, code, content, headers):
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def questions(count=60):
    rows = [
        {
            "question": f"Which bone is number {i} of those in the hand and the wrist?",
            "answer": "Capitate",
            "options": {"A": "Scaphoid", "B": "Lunate", "C": "Capitate", "D": "Hamate"},
            "answer_idx": "C",
        }
        for i in range(count)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@contextmanager
def hub(manner="good", bad_times=1000, files=None, repositories=None):
    """A hub for as long as the block runs: with these data sets, or with one in that manner."""
    one = {REPOSITORY: Repository(files or {"train.jsonl": questions()}, manner, bad_times)}
    running = Hub(one if repositories is None else repositories)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield running
    finally:
        running.shutdown()
        running.server_close()
