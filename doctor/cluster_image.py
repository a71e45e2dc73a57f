"""Whether the registry has the image that pods take, and lets them fetch it.

The registry's HTTP API is asked for the manifest (github.com/opencontainers/distribution-spec), first as anybody, then
with a login of this machine if there is one: a token is fetched where the registry names who gives it out. Pods do not
have this machine's login, but that of IMAGE_PULL_SECRET, which is never read; so a login here tells only that the image
is there.
"""

import base64
import dataclasses
import http.client
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from record import number_formats
from settings.finding import FAIL, PASS, WARN, Finding

TIMEOUT_S = 10.0
MOST_BYTES = 2**22  # of an answer that is read: the largest manifest that registries must take
MANIFESTS = ",".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
PUSH = "make push puts it there"


@dataclasses.dataclass(frozen=True)
class Answer:
    """code: HTTP's; headers with names in lower case; body: as far as it was read."""

    code: int
    headers: Mapping[str, str]
    body: bytes = b""


Ask = Callable[
    [str, Mapping[str, str]], Answer
]  # address and headers; OSError where there is no answer


def ask(address: str, headers: Mapping[str, str]) -> Answer:
    """The answer of a server, whatever its code. A login is not taken along to where an answer leads."""
    request = urllib.request.Request(address)
    for name, value in headers.items():
        (request.add_unredirected_header if name == "Authorization" else request.add_header)(
            name, value
        )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return Answer(response.status, lower(response.headers), response.read(MOST_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, lower(error.headers))
    except urllib.error.URLError as error:
        raise (
            error.reason if isinstance(error.reason, OSError) else OSError(str(error.reason))
        ) from None
    except http.client.HTTPException as error:
        raise OSError(f"no answer in HTTP ({error!r})") from None


def lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


# ---------------------------------------------------------------------------------------------------
# What is said of it
# ---------------------------------------------------------------------------------------------------


def finding(
    image: str, pull_secret: str, asking: Ask = ask, logins: Sequence[Path] | None = None
) -> Finding:
    """Whether pods can fetch an image, REPOSITORY:TAG or REPOSITORY@DIGEST; pull_secret: the name of that which they
    have, "" for none; logins: files of this machine's logins to registries."""
    host, repository, reference = parts(image)
    if not host:
        return Finding(
            "image",
            WARN,
            f"{image} names no registry, so which one nodes ask is theirs to choose: unchecked",
            "write the registry's host in front",
        )
    login = login_of(host, logins_here() if logins is None else logins)
    try:
        answer = manifest(host, repository, reference, "", asking)
        with_login = (
            manifest(host, repository, reference, login, asking)
            if login and answer.code != 200
            else None
        )
    except OSError as error:
        why = f"in {TIMEOUT_S:.0f} s" if isinstance(error, TimeoutError) else f"({error})"
        return Finding(
            "image",
            WARN,
            f"{host} does not answer here {why}, so whether it has {image} is unchecked",
            "nodes may reach it all the same; if not, pods say ErrImagePull",
        )
    if answer.code == 200:
        return Finding("image", PASS, f"{image} is there{size_told(answer)}, for everybody")
    if with_login and with_login.code == 200:
        return private(image, pull_secret, size_told(with_login))
    return refused(
        image,
        host,
        pull_secret,
        answer if with_login is None else with_login,
        with_login is not None,
    )


def private(image: str, pull_secret: str, size: str) -> Finding:
    """An image that only a login sees."""
    text = f"{image} is there{size}, for those with a login only"
    if pull_secret:
        return Finding("image", PASS, f"{text}; pods have that of IMAGE_PULL_SECRET={pull_secret}")
    return Finding(
        "image",
        WARN,
        f"{text}, and pods have none",
        "set IMAGE_PULL_SECRET to a Secret with one "
        "(docs/image.md), unless the cluster's nodes have a login of their own",
    )


def refused(image: str, host: str, pull_secret: str, answer: Answer, logged_in: bool) -> Finding:
    """What a registry's refusal tells."""
    who = "your login" if logged_in else "anybody"
    if answer.code == 404 and (logged_in or not pull_secret):
        hidden = "" if logged_in else ", or shows it to none without a login"
        return Finding("image", FAIL, f"{host} has no {image}{hidden} (404)", PUSH)
    if answer.code in (401, 403, 404) and logged_in:
        return Finding(
            "image",
            WARN,
            f"{host} does not let your login see {image} ({answer.code}), so whether it is "
            "there is unchecked",
            f"log in anew, with docker login {host}",
        )
    if answer.code in (401, 403, 404):
        has = (
            f"; pods have that of IMAGE_PULL_SECRET={pull_secret}"
            if pull_secret
            else "; pods have none, as IMAGE_PULL_SECRET is not set"
        )
        return Finding(
            "image",
            WARN,
            f"{host} shows {image} to none without a login ({answer.code}), so whether it is "
            f"there is unchecked{has}",
            f"docker login {host}, then again",
        )
    return Finding(
        "image",
        WARN,
        f"{host} answers {who} with {answer.code}, so whether it has {image} is unchecked",
        "try again later",
    )


def size_told(answer: Answer) -> str:
    """How much a node fetches, where the manifest is that of one platform."""
    try:
        layers = json.loads(answer.body)["layers"]
        size = sum(int(layer["size"]) for layer in layers)
    except (ValueError, KeyError, TypeError):
        return ""
    return f", {number_formats.size(size)} to fetch"


# ---------------------------------------------------------------------------------------------------
# How a registry is asked
# ---------------------------------------------------------------------------------------------------


def parts(image: str) -> tuple[str, str, str]:
    """(host, repository, tag or digest) of an image; host "" where none is named. A digest goes before a tag."""
    name, _, digest = image.partition("@")
    tag = ""
    if ":" in name.rpartition("/")[2]:
        name, _, tag = name.rpartition(":")
    host, _, rest = name.partition("/")
    if not rest or not ("." in host or ":" in host or host == "localhost"):
        return "", name, digest or tag
    return host, rest, digest or tag


def is_here(host: str) -> bool:
    """Whether a host is this machine, to which one speaks without encryption."""
    return bool(re.fullmatch(r"(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?", host))


def manifest(host: str, repository: str, reference: str, login: str, asking: Ask) -> Answer:
    """The answer to the wish for an image's manifest. login: USER:PASSWORD in base64, "" for none."""
    address = (
        f"{'http' if is_here(host) else 'https'}://{host}/v2/{repository}/manifests/{reference}"
    )
    answer = asking(address, {"Accept": MANIFESTS})
    if answer.code != 401:
        return answer
    scheme, _, rest = answer.headers.get("www-authenticate", "").partition(" ")
    if scheme.lower() == "bearer":
        token = token_of(dict(re.findall(r'(\w+)="([^"]*)"', rest)), repository, login, asking)
        return (
            asking(address, {"Accept": MANIFESTS, "Authorization": f"Bearer {token}"})
            if token
            else answer
        )
    if scheme.lower() == "basic" and login:
        return asking(address, {"Accept": MANIFESTS, "Authorization": f"Basic {login}"})
    return answer


def token_of(challenge: Mapping[str, str], repository: str, login: str, asking: Ask) -> str:
    """A token to read the repository with, from whom the registry names; "" where none is given."""
    realm = urllib.parse.urlsplit(challenge.get("realm", ""))
    if realm.scheme != "https" and not (realm.scheme == "http" and is_here(realm.netloc)):
        return ""  # a login would go there in the open
    query = [
        *urllib.parse.parse_qsl(realm.query),
        ("scope", challenge.get("scope") or f"repository:{repository}:pull"),
    ]
    if "service" in challenge:
        query.append(("service", challenge["service"]))
    answer = asking(
        realm._replace(query=urllib.parse.urlencode(query)).geturl(),
        {"Authorization": f"Basic {login}"} if login else {},
    )
    try:
        given = json.loads(answer.body) if answer.code == 200 else {}
    except ValueError:
        return ""
    return (
        str(given.get("token") or given.get("access_token") or "")
        if isinstance(given, dict)
        else ""
    )


# ---------------------------------------------------------------------------------------------------
# Logins of this machine
# ---------------------------------------------------------------------------------------------------


def logins_here() -> list[Path]:
    """Where docker, podman and buildah keep logins."""
    home = Path.home()
    return [
        home / ".docker" / "config.json",
        Path(f"/run/user/{os.getuid()}/containers/auth.json"),
        Path(f"/run/containers/{os.getuid()}/auth.json"),
        home / ".config" / "containers" / "auth.json",
    ]


def login_of(host: str, files: Sequence[Path]) -> str:
    """The login to a host, USER:PASSWORD in base64; "" where there is none, or a helper program keeps it."""
    for path in files:
        try:
            kept = json.loads(path.read_text(encoding="utf-8")).get("auths") or {}
            login = next(
                (
                    str(entry.get("auth") or "")
                    for name, entry in kept.items()
                    if re.sub(r"^https?://|/.*$", "", name) == host
                ),
                "",
            )
            if ":" in base64.b64decode(login, validate=True).decode():
                return login
        except (OSError, ValueError, AttributeError):  # not there, or nothing that can be read
            continue
    return ""
