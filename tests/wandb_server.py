"""A stand-in for the W&B server on the loopback interface: one that takes a run, or misbehaves in a chosen manner.

It knows of the protocol what wandb 0.31 needs to start, resume and finish a run, and keeps what it is sent.
"""

import gzip
import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MANNERS = ("good", "refuses", "hangs", "401", "500")


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, manner: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.manner = manner
        self.requests: list[str] = []
        self.lines: dict[str, dict[int, str]] = {}  # run id -> offset -> a line of its history
        self.ended: list[tuple[str, int]] = []  # (run id, exit code)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def history(self, run: str) -> list[dict[str, Any]]:
        """The rows of a run in order, each with its _step."""
        lines = self.lines.get(run, {})
        return [json.loads(lines[offset]) for offset in sorted(lines)]

    def bucket(self, run: str) -> dict[str, Any]:
        """What the server tells of a run."""
        lines = self.lines.get(run, {})
        tail = json.dumps([lines[max(lines)]] if lines else [])
        return {
            "id": f"storage-{run}",
            "name": run,
            "displayName": run,
            "description": "",
            "config": "{}",
            "sweepName": None,
            "summaryMetrics": "{}",
            "logLineCount": 0,
            "historyLineCount": len(lines),
            "eventsLineCount": 0,
            "historyTail": tail,
            "eventsTail": "[]",
            "tags": [],
            "notes": "",
            "wandbConfig": '{"t": 1}',
            "project": {
                "id": "p",
                "name": "pure-transformer",
                "entity": {"id": "e", "name": "a-team"},
            },
        }


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.requests.append(f"{self.path} {body[:300]!r}")
        if self.server.manner == "hangs":
            time.sleep(600)
        if self.server.manner in ("401", "500"):
            return self.answer({"errors": [{"message": "no"}]}, int(self.server.manner))
        request = json.loads(body) if body.startswith(b"{") else {}
        if "/file_stream" in self.path:
            return self.take(self.path.split("/")[-2], request)
        variables, name = request.get("variables", {}), request.get("operationName", "")
        run = variables.get("name") or variables.get("run") or ""
        if name == "RunResumeStatus":
            known = self.server.bucket(run) if run in self.server.lines else None
            return self.answer(
                {
                    "data": {
                        "model": {
                            "id": "p",
                            "name": "pure-transformer",
                            "entity": {"id": "e", "name": "a-team"},
                            "bucket": known,
                        }
                    }
                }
            )
        if name == "UpsertBucket":
            new = run not in self.server.lines
            self.server.lines.setdefault(run, {})
            return self.answer(
                {"data": {"upsertBucket": {"bucket": self.server.bucket(run), "inserted": new}}}
            )
        if name == "Viewer":
            return self.answer(
                {
                    "data": {
                        "viewer": {
                            "id": "v",
                            "entity": "a-team",
                            "username": "u",
                            "flags": "{}",
                            "teams": {"edges": []},
                        }
                    }
                }
            )
        if name == "CreateRunFiles":
            return self.answer({"data": {"createRunFiles": {"uploadHeaders": [], "files": []}}})
        self.answer({"data": {}})

    do_GET = do_PUT = do_POST

    def take(self, run: str, request: dict[str, Any]) -> None:
        """Keep the lines of a run's history, and its end."""
        history = request.get("files", {}).get("wandb-history.jsonl")
        for k, line in enumerate(history["content"] if history else []):
            self.server.lines.setdefault(run, {})[history["offset"] + k] = line
        if request.get("complete"):
            self.server.ended.append((run, request.get("exitcode")))
        self.answer({"limits": {}})

    def answer(self, content: dict[str, Any], code: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def server(manner: str) -> Iterator[Server]:
    """A server for as long as the block runs; one that refuses is not there at all."""
    assert manner in MANNERS
    running = Server(manner)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    if manner == "refuses":
        running.server_close()
    else:
        thread.start()
    yield running
    if manner != "refuses":
        running.shutdown()
        running.server_close()
