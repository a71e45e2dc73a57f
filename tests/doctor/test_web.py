"""One question over HTTP, to servers that answer, refuse, hang, drip, redirect: on the loopback interface."""

import email.utils
import time

import pytest

from doctor import web
from tests.doctor.web_server import server

SECRET = "s3cr3t-t0ken"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("status", [200, 401, 403, 404, 429, 500])
def test_an_answer_is_an_answer_whatever_it_says(status: int) -> None:
    with server(lambda _: (status, {"X-Error-Code": "GatedRepo"}, b"body")) as there:
        answer = web.ask(there.url + "/a", web.bearer(SECRET))
    assert (answer.host, answer.status, answer.problem, answer.body) == (
        there.host,
        status,
        "",
        b"body",
    )
    assert answer.headers["x-error-code"] == "GatedRepo" and answer.ok == (status == 200)
    assert there.requests[0][2]["Authorization"] == f"Bearer {SECRET}" and SECRET not in repr(
        answer
    )


def test_data_are_posted_as_json() -> None:
    with server(lambda _: (200, {}, b"{}")) as there:
        web.ask(there.url, web.basic("api", "key"), b'{"a": 1}')
    method, _, headers, body = there.requests[0]
    assert (method, body, headers["Content-Type"]) == ("POST", b'{"a": 1}', "application/json")
    assert headers["Authorization"] == "Basic YXBpOmtleQ=="  # printf api:key | base64


def test_a_server_that_is_not_there_or_breaks_off_is_told(free_port: int) -> None:
    assert web.ask(f"http://127.0.0.1:{free_port}/", {}).problem == "Connection refused"
    with server(lambda _: "closes") as there:
        answer = web.ask(there.url, {})
    assert answer.status is None and answer.problem
    assert web.ask("http://no-such-host.invalid/", {}).problem == "its name is not found (DNS)"


@pytest.mark.parametrize(
    ("manner", "silence_s", "limit_s", "words"),
    [("hangs", 0.3, 30, "nothing came for 0 s"), ("drips", 30, 0.8, "no answer within 1 s")],
)
def test_a_server_that_hangs_is_given_up(
    monkeypatch: pytest.MonkeyPatch, manner: str, silence_s: float, limit_s: float, words: str
) -> None:
    monkeypatch.setattr(web, "SILENCE_S", silence_s)
    began = time.monotonic()
    with server(lambda _: manner) as there:
        answer = web.ask(there.url, {}, limit_s=limit_s)
        assert time.monotonic() - began < 20  # of 60
    assert answer.status is None and answer.problem == words


def test_a_redirect_elsewhere_does_not_get_the_token() -> None:
    with (
        server(lambda _: (200, {}, b"")) as other,
        server(
            lambda path: (
                (307, {"Location": f"{other.url}/x"}, b"")
                if path == "/out"
                else (307, {"Location": "/there"}, b"")
                if path == "/in"
                else (200, {}, b"here")
            )
        ) as there,
    ):
        assert (
            web.ask(there.url + "/out", web.bearer(SECRET)).status == 307 and other.requests == []
        )
        assert web.ask(there.url + "/in", web.bearer(SECRET)).body == b"here"
    assert [request[2]["Authorization"] for request in there.requests] == [f"Bearer {SECRET}"] * 3


def test_nothing_of_a_secret_that_cannot_be_sent_is_told() -> None:
    for secret in (f"{SECRET}\nX: y", f"{SECRET}\u00fc\u20ac"):
        answer = web.ask("http://127.0.0.1:9/", web.bearer(secret))
        assert (
            answer.status is None and "characters" in answer.problem and SECRET not in repr(answer)
        )


def test_an_address_is_told_without_user_and_password() -> None:
    assert web.host_of("https://user:pass@example.org:8443/x") == "example.org:8443"


def test_a_proxy_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setenv("http_proxy", f"http://me:{SECRET}@127.0.0.1:{free_port}")
    monkeypatch.setenv("no_proxy", "")
    assert (
        web.ask("http://example.org/", {}).problem
        == f"Connection refused (through the proxy 127.0.0.1:{free_port})"
    )
    with server(lambda _: (200, {}, b"by proxy")) as there:
        monkeypatch.setenv("http_proxy", there.url)
        assert web.ask("http://example.org/a", {}).body == b"by proxy"
        assert there.requests[0][1] == "http://example.org/a"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        web.ask(there.url + "/b", {})
        assert there.requests[1][1] == "/b"


@pytest.mark.parametrize("off_s", [0, 600, -600])
def test_the_clock_is_compared_with_the_servers(off_s: int) -> None:
    with server(
        lambda _: (200, {"Date": email.utils.formatdate(time.time() - off_s, usegmt=True)}, b"")
    ) as there:
        ahead_s = web.ask(there.url, {}).ahead_s
    assert ahead_s is not None and abs(ahead_s - off_s) < 2


def test_a_time_from_a_cache_or_of_no_form_counts_for_nothing() -> None:
    assert web.ahead_of({"date": "Thu, 01 Jan 1970 00:01:40 GMT"}, 103.5) == 3.0  # 100.5 on average
    assert web.ahead_of({"date": "Thu, 01 Jan 1970 00:01:40 GMT", "age": "7"}, 103.5) is None
    assert web.ahead_of({"date": "soon"}, 103.5) is None and web.ahead_of({}, 103.5) is None


def test_what_goes_wrong_in_the_thread_is_raised() -> None:
    def wrong() -> None:
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        web.within(5, wrong)
    assert web.within(5, lambda: 3) == 3
    assert web.within(0.05, lambda: time.sleep(1)) is None
