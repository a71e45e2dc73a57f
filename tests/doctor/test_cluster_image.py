"""Whether a registry has the image: asked over HTTP, of one on this machine that knows tokens and logins."""

import base64
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from doctor import cluster_image as image
from doctor.cluster_image import Answer, finding
from settings.finding import FAIL, PASS, WARN, Finding

MANIFEST = {"layers": [{"size": 3_000_000_000}, {"size": 150_000_000}]}
LOGIN = base64.b64encode(b"me:a-password").decode()


class Registry(ThreadingHTTPServer):
    """code: of the manifest for those who may see it; open_to: none (no login is asked for), token (anybody's) or
    login; basic: it asks for a login itself."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.code, self.open_to, self.basic = 200, "none", False
        self.asked: list[tuple[str, str]] = []  # address, Authorization

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Registry

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        said = self.headers.get("Authorization", "")
        self.server.asked.append((self.path, said))
        if self.path.startswith("/token"):
            token = "for-login" if said == f"Basic {LOGIN}" else "for-anybody"
            return self.answer(200, {"token": token})
        assert "application/vnd.oci.image.index.v1+json" in self.headers["Accept"]
        wanted = f"Basic {LOGIN}" if self.server.basic else "Bearer for-login"
        allowed = {"none": True, "token": said.startswith("Bearer"), "login": said == wanted}[
            self.server.open_to
        ]
        if allowed:
            return self.answer(self.server.code, MANIFEST)
        wish = (
            'Basic realm="x"'
            if self.server.basic
            else (
                f'Bearer realm="http://{self.server.host}/token",service="here",scope="repository:lab/name:pull"'
            )
        )
        self.answer(401, {}, wish)

    def answer(self, code: int, content: object, wish: str = "") -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        if wish:
            self.send_header("WWW-Authenticate", wish)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def registry() -> Iterator[Registry]:
    server = Registry()
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    ).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def look(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """The finding of lab/name:1 in the registry, its address left out; login: whether this machine has one."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    config = tmp_path / "config.json"

    def call(pull_secret: str = "", *, login: bool = False, name: str = "lab/name:1") -> Finding:
        config.write_text(json.dumps({"auths": {registry.host: {"auth": LOGIN}} if login else {}}))
        found = finding(f"{registry.host}/{name}", pull_secret, logins=[tmp_path / "none", config])
        return Finding(
            found.name,
            found.level,
            *(text.replace(registry.host, "HOST") for text in (found.text, found.fix)),
        )

    return call


def test_an_image_for_everybody(look, registry: Registry) -> None:
    assert look() == Finding(
        "image", PASS, "HOST/lab/name:1 is there, 3.15 GB to fetch, for everybody"
    )
    assert registry.asked == [("/v2/lab/name/manifests/1", "")]
    registry.asked.clear()
    registry.open_to = "token"
    digest = "sha256:" + 64 * "a"
    assert look(login=True, name=f"lab/name:1@{digest}").level == PASS
    assert registry.asked == [
        (f"/v2/lab/name/manifests/{digest}", ""),
        (
            "/token?scope=repository%3Alab%2Fname%3Apull&service=here",
            "",
        ),  # as anybody, though there is a login
        (f"/v2/lab/name/manifests/{digest}", "Bearer for-anybody"),
    ]


@pytest.mark.parametrize("basic", [False, True])
def test_an_image_for_those_with_a_login(look, registry: Registry, basic: bool) -> None:
    registry.open_to, registry.basic = "login", basic
    assert look("login", login=True) == Finding(
        "image",
        PASS,
        "HOST/lab/name:1 is there, 3.15 GB to fetch, for those with a login only; pods have that of "
        "IMAGE_PULL_SECRET=login",
    )
    found = look(login=True)
    assert (found.level, found.text) == (
        WARN,
        "HOST/lab/name:1 is there, 3.15 GB to fetch, for those with a login "
        "only, and pods have none",
    )
    assert found.fix.startswith("set IMAGE_PULL_SECRET to a Secret with one")
    assert look() == Finding(
        "image",
        WARN,
        "HOST shows HOST/lab/name:1 to none without a login (401), so whether it is there is unchecked; "
        "pods have none, as IMAGE_PULL_SECRET is not set",
        "docker login HOST, then again",
    )
    assert look("login").text.endswith("unchecked; pods have that of IMAGE_PULL_SECRET=login")


@pytest.mark.parametrize(
    ("code", "open_to", "pull_secret", "login", "level", "text"),
    [
        (
            404,
            "none",
            "",
            False,
            FAIL,
            "HOST has no HOST/lab/name:1, or shows it to none without a login (404)",
        ),
        (
            404,
            "token",
            "",
            False,
            FAIL,
            "HOST has no HOST/lab/name:1, or shows it to none without a login (404)",
        ),
        (404, "login", "", True, FAIL, "HOST has no HOST/lab/name:1 (404)"),
        (
            404,
            "none",
            "login",
            False,
            WARN,
            "HOST shows HOST/lab/name:1 to none without a login (404), so whether it "
            "is there is unchecked; pods have that of IMAGE_PULL_SECRET=login",
        ),
        (
            403,
            "none",
            "",
            False,
            WARN,
            "HOST shows HOST/lab/name:1 to none without a login (403), so whether it is "
            "there is unchecked; pods have none, as IMAGE_PULL_SECRET is not set",
        ),
        (
            403,
            "login",
            "",
            True,
            WARN,
            "HOST does not let your login see HOST/lab/name:1 (403), so whether it is there is "
            "unchecked",
        ),
        (
            500,
            "none",
            "",
            False,
            WARN,
            "HOST answers anybody with 500, so whether it has HOST/lab/name:1 is unchecked",
        ),
        (
            429,
            "none",
            "",
            True,
            WARN,
            "HOST answers your login with 429, so whether it has HOST/lab/name:1 is unchecked",
        ),
    ],
)
def test_what_a_registry_refuses(
    look,
    registry: Registry,
    code: int,
    open_to: str,
    pull_secret: str,
    login: bool,
    level: str,
    text: str,
) -> None:
    registry.code, registry.open_to = code, open_to
    found = look(pull_secret, login=login)
    assert (found.level, found.text) == (level, text)
    assert found.fix == "make push puts it there" if level == FAIL else found.fix


def test_a_registry_that_does_not_answer() -> None:
    def late(address: str, headers: Mapping[str, str]) -> Answer:
        raise TimeoutError("timed out")

    found = finding("registry.example.org/lab/name:1", "", late, [])
    assert found.level == WARN
    assert found.text == (
        "registry.example.org does not answer here in 10 s, so whether it has "
        "registry.example.org/lab/name:1 is unchecked"
    )
    found = finding("127.0.0.1:1/lab/name:1", "", logins=[])
    assert found.level == WARN and "127.0.0.1:1 does not answer here ([Errno" in found.text


def test_an_image_without_a_registry_is_left_unchecked() -> None:
    found = finding("lab/name:1", "", lambda *_: pytest.fail("asked"), [])
    assert (found.level, found.fix) == (WARN, "write the registry's host in front")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("registry.example.org/lab/name:1", ("registry.example.org", "lab/name", "1")),
        ("localhost/name:1", ("localhost", "name", "1")),
        ("here:5000/a/b/c@sha256:12", ("here:5000", "a/b/c", "sha256:12")),
        ("a.org/name:1@sha256:12", ("a.org", "name", "sha256:12")),
        ("name:1", ("", "name", "1")),
        ("lab/name:1", ("", "lab/name", "1")),
    ],
)
def test_an_images_parts(text: str, parts: tuple[str, str, str]) -> None:
    assert image.parts(text) == parts


def test_a_login_is_not_sent_in_the_open(registry: Registry) -> None:
    asked = []

    def asking(address: str, headers: Mapping[str, str]) -> Answer:
        asked.append((address, dict(headers)))
        return Answer(
            401, {"www-authenticate": 'Bearer realm="http://tokens.example.org/",service="x"'}
        )

    assert image.manifest("registry.example.org", "lab/name", "1", LOGIN, asking).code == 401
    assert [address for address, _ in asked] == [
        "https://registry.example.org/v2/lab/name/manifests/1"
    ]
    assert "Authorization" not in asked[0][1]


def test_a_login_is_not_taken_along_to_where_an_answer_leads(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    class Elsewhere(BaseHTTPRequestHandler):
        log_message = Handler.log_message

        def do_GET(self) -> None:
            self.send_response(307)
            self.send_header("Location", f"http://{registry.host}/v2/lab/name/manifests/1")
            self.send_header("Content-Length", "0")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        answer = image.ask(
            f"http://127.0.0.1:{server.server_port}/",
            {"Accept": image.MANIFESTS, "Authorization": "Bearer a-token"},
        )
        server.shutdown()
    assert answer.code == 200 and registry.asked == [("/v2/lab/name/manifests/1", "")]


def test_logins_of_this_machine(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("none", "broken", "docker", "podman")]
    files[1].write_text("{")
    files[2].write_text(
        json.dumps({"credsStore": "desktop", "auths": {"a.org": {}, "b.org": {"auth": "%%%"}}})
    )
    files[3].write_text(
        json.dumps(
            {
                "auths": {
                    "a.org": {"auth": LOGIN},
                    "https://c.org/v1/": {"auth": LOGIN},
                    "d.org/lab": {"auth": LOGIN},
                }
            }
        )
    )
    assert {
        host: image.login_of(host, files) for host in ("a.org", "b.org", "c.org", "d.org", "e.org")
    } == {"a.org": LOGIN, "b.org": "", "c.org": LOGIN, "d.org": LOGIN, "e.org": ""}
    assert Path.home() / ".docker" / "config.json" in image.logins_here()
