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
LFS_SUFFIXES = (".parquet", ".gz", ".zst", ".safetensors")  # what the hub keeps by its sha256
PAUSES = {"slow": 3, "hangs": 600}  # seconds


@dataclass
class Repository:
    """A data set and the manner in which it is served. requests: how often each of its paths was asked for."""

    files: dict[str, bytes]
    manner: str = "good"
    bad_times: int = 1000
    retry_after: int | None = None
    requests: list[str] = field(default_factory=list)


class Hub(http.server.ThreadingHTTPServer):
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
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/")
        served = [name for name in self.server.repositories if f"/{name}/" in f"/{path}/"]
        line = f"{self.command} {self.path.split('?')[0]}"
        self.server.requests.append(line)
        if not served:
            error = b'{"error": "Repository not found"}'
            return self.send(404, error, {"X-Error-Code": "RepoNotFound"})
        self.repository = self.server.repositories[served[0]]
        self.repository.requests.append(line)
        files = self.repository.files
        _, _, rest = f"/{path}/".partition(f"/{served[0]}/")
        kind, _, rest = rest.strip("/").partition("/")
        _, _, rest = rest.partition("/")  # what comes after the revision
        if kind in ("", "revision"):
            siblings = [self.sibling(name) for name in files]
            facts = {"private": False, "gated": False, "tags": [], "siblings": siblings}
            return self.describe({"id": served[0], "sha": REVISION, **facts})
        if kind == "tree":
            return self.describe(self.tree(rest, "recursive=true" in self.path.lower()))
        if kind == "paths-info":
            paths = urllib.parse.parse_qs(self.body.decode()).get("paths", [])
            return self.describe([self.entry(name) for name in paths if name in files])
        if kind == "resolve" and rest in files:
            entry = self.entry(rest)
            headers = {
                "ETag": f'"{entry.get("lfs", entry)["oid"]}"',
                "X-Repo-Commit": REVISION,
                "Accept-Ranges": "bytes",
                "Content-Type": "application/octet-stream",
            }
            return self.misbehave(files[rest], headers, at="file")
        self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_POST = do_GET

    def entry(self, name):
        """A file as the hub describes it, with true sizes and hashes."""
        content = self.repository.files[name]
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry = {"type": "file", "path": name, "size": len(content), "oid": blob}
        if name.endswith(LFS_SUFFIXES):
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
        return entry

    def sibling(self, name):
        """A file as the description of its repository has it."""
        entry = self.entry(name)
        facts = {"rfilename": name, "size": entry["size"], "blobId": entry["oid"]}
        if "lfs" in entry:
            facts["lfs"] = {**entry["lfs"], "sha256": entry["lfs"]["oid"]}
        return facts

    def tree(self, under, is_recursive):
        """What lies in a folder of the repository: files and folders, or files at any depth."""
        start = f"{under}/" if under else ""
        entries = {}
        for name in self.repository.files:
            if not name.startswith(start):
                continue
            inner, is_deeper, _ = name.removeprefix(start).partition("/")
            if is_deeper and not is_recursive:
                entries[inner] = {"type": "directory", "path": start + inner, "oid": "0" * 40}
            else:
                entries[name] = self.entry(name)
        return list(entries.values())

    def describe(self, facts):
        headers = {"Content-Type": "application/json"}
        self.misbehave(json.dumps(facts).encode(), headers, at="about")

    def misbehave(self, content, headers, at):
        """Answer, well or in the repository's manner. A file is bad when it is read, or asked for its size by "head"."""
        manner, _, place = self.repository.manner.partition(" ")
        with self.server.lock:
            is_bad = place == (f"head {at}" if self.command == "HEAD" else at)
            self.repository.bad_times -= is_bad
            is_bad = is_bad and self.repository.bad_times >= 0
        if not is_bad:
            return self.send(200, content, headers)
        if manner.isdigit():
            after = self.repository.retry_after
            pause = {} if after is None else {"Retry-After": str(after)}
            error = b'{"error": "no"}'
            return self.send(int(manner), error, {"Content-Type": "application/json"} | pause)
        time.sleep(PAUSES.get(manner, 0))
        size = {"Content-Length": str(len(content))}
        answers = {
            "gated": (403, b'{"error": "gated"}', {"X-Error-Code": "GatedRepo"}),
            # As a captive portal does: somewhere else, and with code 200.
            "page": (200, PAGE, {"Content-Type": "text/html"}),
            "wrong": (200, bytes(byte ^ 1 for byte in content), headers),
            "short": (200, content[: len(content) // 2], headers | size),
            "slow": (200, content, headers),
        }
        self.close_connection = manner == "short"
        self.send(*answers[manner])

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
def hub(files=None, repositories=None):
    """A hub for as long as the block runs: with these data sets, or with one of these files."""
    one = {REPOSITORY: Repository(files or {"train.jsonl": questions()})}
    running = Hub(one if repositories is None else repositories)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield running
    finally:
        running.shutdown()
        running.server_close()
