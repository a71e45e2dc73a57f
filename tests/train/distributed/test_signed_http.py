"""What whoever does not know the run's secret can do to a registry: nothing, and it is counted."""

import http.client
import json
import logging
import socket

import pytest

from train.distributed import signed_http
from train.distributed.registry import Client, Members, NotAdmitted, Unreachable, serve

SECRET = "of-the-run-that-is-served"


@pytest.fixture
def members():
    return Members()


@pytest.fixture
def server(members, free_port, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(signed_http, "TIMEOUT_S", 1.0)
    server = serve(members, "127.0.0.1", free_port, lambda: SECRET)
    server.port = free_port
    yield server
    server.shutdown()
    server.server_close()


def client(server, secret=SECRET, name=1):
    return Client("127.0.0.1", server.port, name, lambda: secret, "look for the secret")


def send(server, *parts):
    """Send bytes, reading an answer after each; returns the last answer."""
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        answer = b""
        for part in parts:
            connection.sendall(part)
            answer = connection.recv(2**16)
        return answer


def put(path, body, **headers):
    lines = [f"PUT {path} HTTP/1.1", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


HELLO = b"GET / HTTP/1.1\r\n\r\n"
STRANGE = [
    (b'{"node_rank":1,"host":"x","over":70}\n',),
    (b"\x16\x03\x01\x00\xff\xfe" * 20 + b"\n",),
    (put("/1", b"{}"),),
    (HELLO, put("/1", b"{}")),
    (HELLO, put("/1", b"{}", Signature="0" * 64)),
    (HELLO, put("/1", b"{}", Signature="\xff\xfe")),
    (HELLO, b"PUT /1 HTTP/1.1\r\nContent-Length: -1\r\n\r\n{}"),
    (HELLO, b"PUT /1 HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n{}"),
    (HELLO, b"PUT /1 HTTP/1.1\r\nContent-Length: 1048576\r\n\r\n"),  # is not read
    (HELLO, HELLO),
    (HELLO, b"GET /members HTTP/1.1\r\n\r\n"),
    (HELLO, b"DELETE /1 HTTP/1.1\r\n\r\n"),
    (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",),
]


@pytest.mark.parametrize("parts", STRANGE, ids=range(len(STRANGE)))
def test_a_stranger_is_refused_and_counted(server, members, parts):
    answer = send(server, *parts)
    is_http = b" HTTP/1.1\r" in parts[0]
    assert answer.partition(b"\r")[0] == (b"HTTP/1.1 401 Unauthorized" if is_http else b"")
    assert members.members == {}
    assert server.refused == 1


def test_their_bytes_do_not_reach_the_log(server, caplog):
    body = json.dumps({"settings": {"\x1b[31mRED": 1}}).encode()
    for _ in range(5):
        send(server, HELLO, put("/\x1b[31mRED", body))
    words = " requests without the run's secret were refused"
    assert [record.getMessage() for record in caplog.records] == [f"{n}{words}" for n in (1, 2, 4)]


def test_a_request_that_was_overheard_is_refused_when_it_is_sent_again(server, monkeypatch):
    sent = []
    sendall = socket.socket.sendall

    def overhear(connection, data):
        sent.append(bytes(data))
        sendall(connection, data)

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "sendall", overhear)
        client(server).say(node_rank=1)
    assert client(server).read()[1]["beat"] == 1
    request = b"".join(part for part in sent if not part.startswith((b"GET", b"HTTP")))
    assert request.startswith(b"PUT /1") and b'"beat": 1' in request
    assert b"401" in send(server, HELLO, request)


def test_slow_clients_hold_nobody_up_and_are_cut_off(server, members, monkeypatch):
    monkeypatch.setattr(signed_http, "TIMEOUT_S", 600.0)
    crowd = []
    for _ in range(signed_http.MOST_STRANGERS + 40):
        slow = socket.create_connection(("127.0.0.1", server.port), 10)
        slow.sendall(b"PUT /1 HTTP/1.1\r\nX: ")
        crowd.append(slow)
    client(server).say(node_rank=1)
    assert list(members.members) == [1]
    assert server.refused >= 40
    monkeypatch.setattr(signed_http, "TIMEOUT_S", 0.5)
    for slow in crowd:
        slow.settimeout(30)
        assert receive(slow) == b""  # it is closed
    assert server.refused >= len(crowd)


def receive(connection):
    try:
        return connection.recv(10)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("secret", [None, "of-another-run-than-this"])
def test_a_machine_without_the_secret_is_told_what_it_lacks(server, members, secret):
    with pytest.raises(NotAdmitted, match=r"refuses this machine: look for the secret"):
        client(server, secret).say()
    assert members.members == {}


def test_an_answer_that_is_not_signed_is_not_believed(members, free_port, monkeypatch):
    """A program of somebody else's on the port of node 0, which lets everybody in."""
    monkeypatch.setattr(signed_http, "is_same", lambda *_: True)
    server = serve(members, "127.0.0.1", free_port, lambda: "of-an-impostor-there")
    server.port = free_port
    with pytest.raises(NotAdmitted):
        client(server).say()
    assert list(members.members) == [1]
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(), "a:1 refuses connections: nothing is started there yet"),
        (TimeoutError(), "does not answer in 5 s: a firewall"),
        (socket.gaierror(-2, "Name or service not known"), r"reached \(Name or service not known"),
        (http.client.BadStatusLine("220 mail.example.org"), "is another program's port"),
    ],
)
def test_why_a_registry_is_not_reached_is_said(monkeypatch, error, words):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(http.client.HTTPConnection, "request", fail)
    with pytest.raises(Unreachable, match=words):
        Client("a", 1, 1, lambda: "", "").read()


@pytest.mark.parametrize(
    ("host", "bound"),
    [
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),
        ("a-name-of-this-machine", "::"),
        ("198.51.100.1", "::"),  # of another machine: this one may be behind NAT
    ],
)
def test_a_registry_listens_at_its_address_and_on_all_where_that_is_not_known_here(
    free_port, host, bound, monkeypatch
):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])  # as if the name had an address
    with signed_http.listen(host, free_port) as listener:
        assert listener.getsockname()[0] in (bound, bound.replace("::", "0.0.0.0"))
