"""make push by the real buildah to a registry on this machine: the digest that is noted is what the registry keeps.

Needs root and buildah, which make image-test needs as well; without them it is skipped.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from k8s.cluster.image_ref import image_of
from settings.config import Config
from tests.scripts.image_stubs import Clone, clone

__all__ = ["clone"]  # a fixture

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("buildah") is None,
    reason="needs root and buildah (apt-get install buildah)",
)


class Registry(ThreadingHTTPServer):
    """As much of the distribution protocol as a push needs, in memory. With `locked` it lets nobody in."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.uploads: dict[str, bytes] = {}
        self.locked = False


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Registry

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_any(self) -> None:
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        if self.server.locked and path != "/v2/":
            return self.answer(
                401,
                b'{"errors":[{"code":"UNAUTHORIZED","message":"authentication required"}]}',
                WWW_Authenticate='Basic realm="registry"',
                Content_Type="application/json",
            )
        name = path.rpartition("/")[2]
        if path == "/v2/":
            return self.answer(200)
        if path.endswith("/blobs/uploads/"):
            upload = uuid.uuid4().hex
            self.server.uploads[upload] = b""
            return self.answer(202, Location=path + upload)
        if "/blobs/uploads/" in path:
            self.server.uploads[name] += body
            if self.command == "PATCH":
                return self.answer(
                    202, Location=path, Range=f"0-{len(self.server.uploads[name]) - 1}"
                )
            digest = re.sub("%3[aA]", ":", re.search(r"digest=([^&]+)", query)[1])  # type: ignore[index]
            content = self.server.uploads.pop(name)
            assert digest == f"sha256:{hashlib.sha256(content).hexdigest()}"
            self.server.blobs[digest] = content
            return self.answer(201, Location=path)
        if "/manifests/" in path and self.command == "PUT":
            digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
            self.server.manifests[name] = body
            return self.answer(201, Docker_Content_Digest=digest, Location=path)
        if name in self.server.blobs:
            return self.answer(200, self.server.blobs[name])
        return self.answer(404)

    do_GET = do_HEAD = do_POST = do_PATCH = do_PUT = handle_any


@pytest.fixture
def registry() -> Iterator[Registry]:
    server = Registry()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def real(clone: Clone, tmp_path: Path, registry: Registry) -> Clone:
    """A clone whose builder is this machine's buildah, with a store of its own."""
    (tmp_path / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/graph"\nrunroot = "{tmp_path}/run"\n'
    )
    # the clone's PATH has no tools but the script's own
    clone.env |= {
        "PATH": os.environ["PATH"],
        "CONTAINERS_STORAGE_CONF": str(tmp_path / "storage.conf"),
        "BUILDAH_ISOLATION": "chroot",
        "IMAGE_BUILDER": "buildah",
        "TMPDIR": str(tmp_path),
        "IMAGE": f"127.0.0.1:{registry.server_address[1]}/lab/name",
    }
    return clone


@pytest.fixture
def built(real: Clone, tmp_path: Path) -> Clone:
    """A clone whose image is there: a small one, labelled as make image labels it."""
    clone = real
    base = re.search(
        r"^ARG BASE_IMAGE=(.*)$", (clone.root / "docker" / "Dockerfile").read_text(), re.M
    )
    assert base
    commit = clone.git("rev-parse", "HEAD")
    (tmp_path / "hello").write_text("hello\n")
    (tmp_path / "Dockerfile").write_text(
        f'FROM scratch\nCOPY hello /\nLABEL org.opencontainers.image.revision="{commit}"\n'
        f'LABEL pure-transformer.built-with="torch=cu126 base={base[1]} flash-attn=none"\n'
    )
    subprocess.run(
        [
            "buildah",
            "bud",
            "--quiet",
            "--file",
            tmp_path / "Dockerfile",
            "--tag",
            f"{clone.env['IMAGE']}:{commit[:12]}",
            tmp_path,
        ],
        env=clone.env,
        check=True,
        capture_output=True,
    )
    return clone


def test_an_image_upon_a_local_base_is_for_the_processors_of_the_cluster(real: Clone) -> None:
    def buildah(*arguments: str | Path) -> str:
        return subprocess.run(
            ["buildah", *arguments], env=real.env, check=True, capture_output=True, text=True
        ).stdout

    dockerfile = real.root / "docker" / "Dockerfile"
    dockerfile.write_text("ARG BASE_IMAGE=scratch\nFROM ${BASE_IMAGE}\nCOPY train/main.py /\n")
    buildah(
        "bud",
        "--quiet",
        "--platform",
        "linux/amd64",
        "--file",
        dockerfile,
        "--tag",
        "localhost/base:test",
        real.root,
    )
    done = real.run(
        "image", "--", "--pull-never", BASE_IMAGE="localhost/base:test", TORCH_BACKEND="cpu"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tag = f"{real.env['IMAGE']}:{real.git('rev-parse', 'HEAD')[:12]}-dirty"
    made = json.loads(buildah("inspect", "--type", "image", tag))
    assert (made["OCIv1"]["os"], made["OCIv1"]["architecture"]) == ("linux", "amd64")


def test_the_digest_that_is_noted_is_what_the_registry_keeps(
    built: Clone, registry: Registry
) -> None:
    done = built.run("push", "--", "--tls-verify=false")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is here already" in done.stdout
    commit = built.git("rev-parse", "HEAD")
    manifest = registry.manifests[commit[:12]]
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    repository = built.env["IMAGE"]
    assert (built.root / ".image").read_text() == f"{repository}@{digest}\n"
    assert image_of(Config(image=repository), built.root) == f"{repository}@{digest}"
    config = json.loads(registry.blobs[json.loads(manifest)["config"]["digest"]])
    assert config["config"]["Labels"]["org.opencontainers.image.revision"] == commit


def test_a_registry_that_wants_a_login_is_one_sentence(built: Clone, registry: Registry) -> None:
    registry.locked = True
    done = built.run("push", "--", "--tls-verify=false")
    assert done.returncode == 78, done.stdout + done.stderr
    [said] = done.stderr.splitlines()
    assert f"type `buildah login 127.0.0.1:{registry.server_address[1]}`" in said
    assert not (built.root / ".image").exists() and not registry.manifests
