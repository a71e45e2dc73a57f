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
ENTITY = {"id": "e", "name": "a-team"}
PROJECT = {
    "id": "p",
    "name": "pure-transformer",
    "entity": ENTITY,
}


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, manner: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.manner = manner
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.lines: dict[str, dict[int, str]] = {}  # run id -> offset -> a line of its history
        self.ended: list[tuple[str, int]] = []  # (run id, exit code)

    def read_history(self, run: str) -> list[dict[str, Any]]:
        """Return the rows of a run in order, each with its _step."""
        lines = self.lines[run]
        return [json.loads(lines[offset]) for offset in sorted(lines)]

    def answer(self, name: str, run: str) -> dict[str, Any]:
        """Answer an operation of the GraphQL interface."""
        if name == "Viewer":
            return {
                "viewer": {
                    "id": "v",
                    "entity": "a-team",
                    "username": "u",
                    "flags": "{}",
                }
            }
        if name == "CreateRunFiles":
            return {"createRunFiles": {"uploadHeaders": [], "files": []}}
        if name == "RunResumeStatus":
            bucket = self.describe(run) if run in self.lines else None
            return {"model": PROJECT | {"bucket": bucket}}
        if name == "UpsertBucket":
            is_new = run not in self.lines
            self.lines.setdefault(run, {})
            return {"upsertBucket": {"bucket": self.describe(run), "inserted": is_new}}
        return {}

    def describe(self, run: str) -> dict[str, Any]:
        """Return what the server says of a run."""
        lines = self.lines[run]
        return {
            "id": f"storage-{run}",
            "name": run,
            "displayName": run,
            "config": "{}",
            "summaryMetrics": "{}",
            "logLineCount": 0,
            "historyLineCount": len(lines),
            "eventsLineCount": 0,
            "historyTail": json.dumps([lines[offset] for offset in sorted(lines)[-1:]]),
            "eventsTail": "[]",
            "tags": [],
            "wandbConfig": '{"t": 1}',
            "project": PROJECT,
        }

    def take(self, run: str, request: dict[str, Any]) -> None:
        """Keep the lines of a run's history, and its end."""
        history = request.get("files", {}).get("wandb-history.jsonl", {"content": []})
        for number, line in enumerate(history["content"], history.get("offset", 0)):
            self.lines[run][number] = line
        if request.get("complete"):
            self.ended.append((run, request["exitcode"]))


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        manner = self.server.manner
        if manner == "hangs":
            time.sleep(600)
        if manner in ("401", "500"):
            return self.reply({"errors": [{"message": "no"}]}, int(manner))
        request = json.loads(body) if body.startswith(b"{") else {}
        if "/file_stream" in self.path:
            self.server.take(self.path.split("/")[-2], request)
            return self.reply({"limits": {}})
        variables = request.get("variables", {})
        run = variables.get("name") or variables.get("run") or ""
        self.reply({"data": self.server.answer(request.get("operationName", ""), run)})

    do_GET = do_PUT = do_POST

    def reply(self, content: dict[str, Any], code: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def server(manner: str) -> Iterator[Server]:
    """A server for as long as the block runs; one that refuses is not there at all."""
    assert manner in MANNERS
    with Server(manner) as running:
        if manner == "refuses":
            running.server_close()
            yield running
            return
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()
