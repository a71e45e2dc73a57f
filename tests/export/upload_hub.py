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
        if self.repository.manner == f"closed {kind}" and self.is_bad(kind):
            self.rfile.read(size // 2)
            self.close_connection = True
            return None
        self.body = self.rfile.read(size)
        if self.repository.manner == f"silent {kind}" and self.is_bad(kind):
            threading.Event().wait(2)
            self.close_connection = True
            return None
        will_fail = self.repository.manner.endswith(f" {kind}") and self.repository.bad_times > 0
        answer, headers = ({}, {}) if will_fail else getattr(self, kind)()
        return self.misbehave(json.dumps(answer).encode(), headers, at=kind)

    do_PUT = do_POST

    def misbehave(self, content: bytes, headers: dict[str, str], at: str) -> None:
        if at not in ("put", "complete") and self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.send(401, b"{}", {})
        return super().misbehave(content, headers, at)

    def entry(self, name: str) -> dict[str, Any]:
        """A file as the Hub describes it: of one in LFS, git's hash is that of a pointer."""
        entry = super().entry(name)
        return entry | {"oid": "0" * 40} if "lfs" in entry else entry

    def create(self) -> tuple[Any, dict[str, str]]:
        self.server.created.append(json.loads(self.body))
        self.server.repositories[self.server.name] = self.server.target
        return {"url": f"{self.server.url}/{self.server.name}"}, {}

    def yaml(self) -> tuple[Any, dict[str, str]]:
        return {"warnings": [], "errors": []}, {}

    def preupload(self) -> tuple[Any, dict[str, str]]:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": file["path"] == self.server.ignored,
            }
            for file in json.loads(self.body)["files"]
        ]
        return {"files": files}, {}

    def batch(self) -> tuple[Any, dict[str, str]]:
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            if wanted["oid"] not in self.server.store:
                wanted["actions"] = {"upload": self.upload(wanted["oid"], wanted["size"])}
            objects.append(wanted)
        return {"objects": objects}, {}

    def upload(self, oid: str, size: int) -> dict[str, Any]:
        """Return where to send a file: whole, or in parts and then a word that all are there."""
        put = f"{self.server.url}/put/{oid}/"
        if size <= PART:
            return {"href": f"{put}1"}
        parts = {str(i + 1): f"{put}{i + 1}" for i in range(-(-size // PART))}
        return {
            "href": f"{self.server.url}/complete/{oid}/{len(parts)}",
            "header": {"chunk_size": str(PART), **parts},
        }

    def put(self) -> tuple[Any, dict[str, str]]:
        oid, part = self.path.split("/")[2:]
        parts = self.server.parts.setdefault(oid, {})
        parts[int(part)] = self.body
        self.keep(oid, parts)
        return {}, {"ETag": hashlib.md5(self.body).hexdigest()}

    def complete(self) -> tuple[Any, dict[str, str]]:
        oid, count = self.path.split("/")[2:]
        sent = json.loads(self.body)["parts"]
        parts = self.server.parts[oid]
        tags = [hashlib.md5(parts[part["partNumber"]]).hexdigest() for part in sent]
        assert len(parts) == int(count) and tags == [part["etag"] for part in sent]
        return {}, {}

    def keep(self, oid: str, parts: dict[int, bytes]) -> None:
        """Take a file into LFS once its parts have its hash."""
        content = b"".join(parts[i] for i in sorted(parts))
        if hashlib.sha256(content).hexdigest() == oid:
            self.server.store[oid] = content

    def commit(self) -> tuple[Any, dict[str, str]]:
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.server.messages.append(value["summary"])
            elif line["key"] == "file":
                self.server.target.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.target.files[value["path"]] = self.server.store[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del self.server.target.files[value["path"]]
        url = f"{self.server.url}/{self.server.name}/commit/{COMMIT}"
        return {"commitUrl": url, "commitOid": COMMIT}, {}


@contextmanager
def upload_hub(name: str, manner: str = "good", bad_times: int = 1000) -> Iterator[UploadHub]:
    """A Hub on which the repository is not there yet."""
    with hub(repositories={}) as server:
        server.RequestHandlerClass = Uploads
        server.name = name
        server.target = Repository({".gitattributes": b""}, manner, bad_times)
        server.store, server.parts, server.created, server.messages = {}, {}, [], []
        server.ignored = ""
        yield cast(UploadHub, server)
