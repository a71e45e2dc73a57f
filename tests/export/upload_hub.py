"""The Hub's side of an upload on the loopback interface, added to the stand-in that serves data sets.

Its answers have the fields that huggingface_hub reads. A manner, such as "500 commit", spoils one kind of request:
create, preupload, batch, put or commit. "closed put" closes the connection after half of what is sent, and
"silent put" a while after all of it.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from tests.faults.hub import Handler, Hub, Repository, hub

TOKEN = "hf_of-a-test"
COMMIT = "fedcba98" * 5
PART = 2**16  # bytes of a large file that are sent at once
KINDS = {
    "create": "/api/repos/create",
    "yaml": "/api/validate-yaml",
    "preupload": "/api/models/.*/preupload/main",
    "batch": r"/.*\.git/info/lfs/objects/batch",
    "put": "/put/.*",
    "complete": "/complete/.*",
    "commit": "/api/models/.*/commit/main",
}


class UploadHub(Hub):
    """A Hub with one repository to write to.

    Attributes:
        store: sha256 -> content that is in LFS.
        parts: sha256 -> parts of a file that is under way, by number.
        created: what was asked for to be created.
        messages: of the commits.
        ignored: a file that the repository's .gitignore leaves out.
    """

    name: str
    target: Repository
    store: dict[str, bytes]
    parts: dict[str, dict[int, bytes]]
    created: list[dict[str, Any]]
    messages: list[str]
    ignored: str


class Uploads(Handler):
    server: UploadHub

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        kind = next((kind for kind in KINDS if re.fullmatch(KINDS[kind], path)), "")
        if not kind:
            return self.do_GET()
        self.server.requests.append(kind)
        self.repository = self.server.target
        size = int(self.headers["Content-Length"])
        manner, _, spoiled = self.repository.manner.partition(" ")
        is_spoiled = spoiled == kind and self.repository.bad_times > 0
        if is_spoiled and manner in ("closed", "silent"):
            self.repository.bad_times -= 1
            self.close_connection = True
            if manner == "closed":
                self.rfile.read(size // 2)
            else:
                self.rfile.read(size)
                threading.Event().wait(10)
            return None
        self.body = self.rfile.read(size)
        answer = {}
        if not is_spoiled:
            answer = getattr(self, kind)()
        content = json.dumps(answer).encode()
        tag = hashlib.md5(self.body).hexdigest()
        return self.misbehave(content, {"ETag": tag}, at=kind)

    do_PUT = do_POST

    def misbehave(self, content: bytes, headers: dict[str, str], at: str) -> None:
        if at not in ("put", "complete") and self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.send(401, b"{}", {})
        return super().misbehave(content, headers, at)

    def entry(self, name: str) -> dict[str, Any]:
        """Describe a file as the Hub does. Git keeps a pointer in place of a file in LFS, and hashes it."""
        entry = super().entry(name)
        if "lfs" in entry:
            entry["oid"] = "0" * 40
        return entry

    def create(self) -> Any:
        self.server.created.append(json.loads(self.body))
        self.server.repositories[self.server.name] = self.server.target
        return {"url": f"{self.server.url}/{self.server.name}"}

    def yaml(self) -> Any:
        return {"warnings": [], "errors": []}

    def preupload(self) -> Any:
        files = []
        for file in json.loads(self.body)["files"]:
            path = file["path"]
            mode = "regular"
            if path.endswith(".safetensors"):
                mode = "lfs"
            is_ignored = path == self.server.ignored
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": is_ignored})
        return {"files": files}

    def batch(self) -> Any:
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            if wanted["oid"] not in self.server.store:
                wanted["actions"] = {"upload": self.upload(wanted["oid"], wanted["size"])}
            objects.append(wanted)
        return {"objects": objects}

    def upload(self, oid: str, size: int) -> dict[str, Any]:
        """Return where to send a file: whole, or in parts and then a word that all are there."""
        put = f"{self.server.url}/put/{oid}/"
        if size <= PART:
            return {"href": f"{put}1"}
        count = -(-size // PART)
        header = {"chunk_size": str(PART)}
        for i in range(1, count + 1):
            header[str(i)] = f"{put}{i}"
        href = f"{self.server.url}/complete/{oid}/{count}"
        return {"href": href, "header": header}

    def put(self) -> Any:
        oid, part = self.path.split("/")[2:]
        parts = self.server.parts.setdefault(oid, {})
        parts[int(part)] = self.body
        content = b"".join(parts[i] for i in sorted(parts))
        if hashlib.sha256(content).hexdigest() == oid:
            self.server.store[oid] = content
        return {}

    def complete(self) -> Any:
        oid, count = self.path.split("/")[2:]
        sent = json.loads(self.body)["parts"]
        assert len(sent) == int(count)
        for part in sent:
            content = self.server.parts[oid][part["partNumber"]]
            assert part["etag"] == hashlib.md5(content).hexdigest()
        return {}

    def commit(self) -> Any:
        files = self.server.target.files
        for line in self.body.splitlines():
            change = json.loads(line)
            value = change["value"]
            match change["key"]:
                case "header":
                    self.server.messages.append(value["summary"])
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.server.store[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        url = f"{self.server.url}/{self.server.name}/commit/{COMMIT}"
        return {"commitUrl": url, "commitOid": COMMIT}


@contextmanager
def upload_hub(name: str, manner: str = "good", bad_times: int = 1000) -> Iterator[UploadHub]:
    """A Hub on which the repository is not there yet."""
    with hub(repositories={}) as server:
        server.RequestHandlerClass = Uploads
        server.name = name
        server.target = Repository({".gitattributes": b""}, manner, bad_times)
        server.store = {}
        server.parts = {}
        server.created = []
        server.messages = []
        server.ignored = ""
        yield cast(UploadHub, server)
