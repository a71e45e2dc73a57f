"""W&B, the hub and the clock: asked of stand-ins on the loopback interface, judged on made answers."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from doctor import online as outside
from doctor.online import Hub, Wanted
from doctor.web import Answer
from settings.config import Config
from settings.finding import FAIL, PASS, WARN, Finding
from tests.conftest import make_data
from tests.doctor.web_server import server
from train.data.data_paths import source_of
from train.data.sources.pin import File, Pinned, pin_path, text_of

KEY = "k3y-of-forty-characters"
TOKEN = "hf_t0ken"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "http_proxy",
        "HTTP_PROXY",
        "all_proxy",
        "ALL_PROXY",
        "WANDB_BASE_URL",
        "WANDB_IDENTITY_TOKEN_FILE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)


def config(**values: Any) -> Config:
    return dataclasses.replace(Config(), **values).derived()


def told(finding: Finding) -> str:
    return f"{finding.level} {finding.text}; {finding.fix}"


# ---- W&B


def viewer(**values: Any) -> bytes:
    return json.dumps({"data": {"viewer": values or None}}).encode()


MINE = viewer(entity="me", username="me", teams={"edges": [{"node": {"name": "lab"}}]})
ONLINE = config(wandb_api_key=KEY, wandb_mode="online")
AUTO = config(wandb_api_key=KEY)


@pytest.mark.parametrize(
    ("reply", "auto", "online", "words"),
    [
        ((200, {}, MINE), PASS, PASS, "takes the key, for me"),
        ((401, {}, b"{}"), WARN, FAIL, "refuses the key (401)"),
        ((403, {}, b"{}"), WARN, FAIL, "refuses the key (403)"),
        ((200, {}, viewer()), WARN, FAIL, "refuses the key (200)"),
        (
            (500, {}, b"{}"),
            WARN,
            WARN,
            "is out of reach: it answers 500; the run goes on into files",
        ),
        ((200, {}, b"<html>"), WARN, WARN, "not as W&B does"),
        ("closes", WARN, WARN, "is out of reach"),
    ],
)
def test_wandb_fails_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, reply: Any, auto: str, online: str, words: str
) -> None:
    with server(lambda _: reply) as there:
        monkeypatch.setenv("WANDB_BASE_URL", there.url + "/")
        for c, level in ((AUTO, auto), (ONLINE, online)):
            finding = outside.wandb(c, outside.ask_wandb(c))
            assert (
                finding.level == level
                and words in finding.text
                and bool(finding.fix) == (level != PASS)
            )
            assert KEY not in told(finding)
    assert there.requests[0][:2] == ("POST", "/graphql") and b"viewer" in there.requests[0][3]


def test_a_team_that_is_not_ones_own_is_told() -> None:
    answer = Answer("h", 200, body=MINE)
    assert (
        outside.wandb(dataclasses.replace(ONLINE, wandb_entity="lab"), answer).text
        == "h takes the key, for lab"
    )
    finding = outside.wandb(dataclasses.replace(ONLINE, wandb_entity="labs"), answer)
    assert (
        finding.level == FAIL and "WANDB_ENTITY=labs: the key at h is for me, lab" in finding.text
    )
    assert outside.wandb(dataclasses.replace(AUTO, wandb_entity="labs"), answer).level == WARN


def test_wandb_is_not_asked_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(lambda _: (200, {}, MINE)) as there:
        monkeypatch.setenv("WANDB_BASE_URL", there.url)
        for c in (
            config(),
            config(wandb_mode="offline", wandb_api_key=KEY),
            config(wandb_mode="disabled", wandb_api_key=KEY),
        ):
            assert outside.ask_wandb(c) is None and outside.wandb(c, None).level == PASS
    assert there.requests == []


def test_the_key_that_wandb_login_left_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with server(lambda _: (200, {}, MINE)) as there:
        monkeypatch.setenv("WANDB_BASE_URL", there.url)
        (tmp_path / "netrc").write_text(f"machine {there.host}\n login user\n password {KEY}\n")
        assert outside.wandb(config(), outside.ask_wandb(config())).level == PASS
    assert (
        there.requests[0][2]["Authorization"] == "Basic YXBpOmszeS1vZi1mb3J0eS1jaGFyYWN0ZXJz"
    )  # of api:KEY
    monkeypatch.setenv("WANDB_IDENTITY_TOKEN_FILE", "/x")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert "token file" in outside.wandb(config(), outside.ask_wandb(config())).text


# ---- The hub


def test_what_is_here_is_not_asked_for(tmp_path: Path) -> None:
    own = make_data(tmp_path)
    here = config(data_dir=own["DATA_DIR"], tokenizer=own["TOKENIZER"], vocab_size=512)
    assert (
        outside.wanted_of(here) == () == outside.wanted_of(config(data_dir=str(tmp_path / "none")))
    )
    assert outside.hub(outside.ask_hub(here))[0].level == PASS
    both = dataclasses.replace(here, data_mix="python-stdlib:1,usmle:1")
    assert outside.wanted_of(both) == (
        Wanted("datasets", "GBaker/MedQA-USMLE-4-options", "DATA_MIX"),
    )
    gpt2 = dataclasses.replace(here, tokenizer="openai-community/gpt2")
    assert outside.wanted_of(gpt2) == (Wanted("models", "openai-community/gpt2", "TOKENIZER"),)
    kept = tmp_path / "tokenizers" / "openai-community--gpt2" / "tokenizer.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    assert outside.wanted_of(gpt2) == ()


def test_shards_of_a_source_on_the_hub_that_are_here_are_enough(tmp_path: Path) -> None:
    """As they would be, had they been made from there: its declaration is of the hub, its pin and shards are here."""
    own = make_data(tmp_path)
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "mine.toml").write_text(
        'repository = "me/mine"\nvalidation_fraction = 0.1\n'
    )
    c = config(
        data_dir=own["DATA_DIR"],
        tokenizer=own["TOKENIZER"],
        vocab_size=512,
        data_mix="mine:1",
        train_tokens=100_000,
    )
    assert outside.wanted_of(c) == (Wanted("datasets", "me/mine", "DATA_MIX"),)
    s = source_of(c, "mine")
    pin_path(s, tmp_path / "mine").parent.mkdir()
    pin_path(s, tmp_path / "mine").write_text(
        text_of(Pinned(s, 40 * "a", (File("x", 1, "sha256:0"),)))
    )
    made = next(tmp_path.glob("python-stdlib/*/*/manifest.json")).parent
    there = tmp_path / "mine" / f"{12 * 'a'}-{s.identity}" / made.name
    shutil.copytree(made, there)
    assert outside.wanted_of(c) == ()
    (there / "manifest.json").unlink()
    assert outside.wanted_of(c) != ()


def test_a_source_that_is_none_is_a_bad_setting() -> None:
    (finding,) = outside.hub(outside.ask_hub(config(data_mix="finewebb:1")))
    assert (
        finding.level == FAIL
        and finding.code == 64
        and "finewebb, which is no source" in finding.text
    )


GATED = {"X-Error-Code": "GatedRepo"}


@pytest.mark.parametrize(
    ("reply", "token", "level", "words"),
    [
        ((200, {}, b""), "", PASS, " lets read DATA_MIX: GBaker/MedQA-USMLE-4-options"),
        (
            (401, GATED, b""),
            "",
            FAIL,
            "is gated, and may not be read (401); accept its license at https://127.0.0.1",
        ),
        ((403, GATED, b""), TOKEN, FAIL, "with the account of HF_TOKEN"),
        ((403, {}, b""), TOKEN, FAIL, "is gated"),
        (
            (401, {"X-Error-Code": "RepoNotFound"}, b""),
            "",
            FAIL,
            "or not for everybody (401); check the name, or set ",
        ),
        ((404, {}, b""), TOKEN, FAIL, "or not for everybody (404); check the name"),
        ((500, {}, b""), "", WARN, "answers 500 just now"),
        ((429, {}, b""), "", WARN, "answers 429 just now"),
        (
            (302, {"Location": "http://127.0.0.1:9/login"}, b""),
            "",
            FAIL,
            "out of reach (it sends elsewhere (302))",
        ),
        ("closes", "", FAIL, "is out of reach"),
    ],
)
def test_what_the_hub_says_of_a_repository(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reply: Any, token: str, level: str, words: str
) -> None:
    c = config(data_mix="usmle:1", data_dir=str(tmp_path), hf_token=token)
    with server(lambda path: (200, {}, b"{}") if "whoami" in path else reply) as there:
        monkeypatch.setattr(constants, "ENDPOINT", there.url)
        (finding,) = outside.hub(outside.ask_hub(c))
    assert told(finding).startswith(level) and words in told(finding) and TOKEN not in told(finding)
    paths = sorted(request[1] for request in there.requests)
    assert (
        paths
        == ["/api/datasets/GBaker/MedQA-USMLE-4-options/auth-check", "/api/whoami-v2"][
            : 2 if token else 1
        ]
    )
    assert {request[2].get("Authorization") for request in there.requests} == {
        f"Bearer {token}" if token else None
    }


def test_a_token_that_is_refused_is_told_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    c = config(
        data_mix="usmle:1,fineweb-edu:1", tokenizer="openai-community/gpt2", data_dir=str(tmp_path)
    )
    monkeypatch.setattr(
        huggingface_hub, "get_token", lambda: TOKEN
    )  # where huggingface-cli login left one
    with server(lambda _: (401, {}, b"")) as there:
        monkeypatch.setattr(constants, "ENDPOINT", there.url)
        (finding,) = outside.hub(outside.ask_hub(c))
    assert (
        finding.level == FAIL
        and "refuses HF_TOKEN (401)" in finding.text
        and len(there.requests) == 4
    )
    assert TOKEN not in told(finding)


def test_offline_means_that_nobody_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with server(lambda _: (200, {}, b"")) as there:
        monkeypatch.setattr(constants, "ENDPOINT", there.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        (finding,) = outside.hub(
            outside.ask_hub(config(data_mix="usmle:1", data_dir=str(tmp_path)))
        )
    assert finding.level == FAIL and "HF_HUB_OFFLINE" in finding.text and there.requests == []


def test_repositories_of_which_the_same_is_said_share_a_line() -> None:
    wanted = (
        Wanted("models", "a/b", "TOKENIZER"),
        Wanted("datasets", "c/d", "DATA_MIX"),
        Wanted("datasets", "e/f", "DATA_MIX"),
    )
    read, gated, away = (
        Answer("h", 200),
        Answer("h", 403),
        Answer("h", problem="its name is not found (DNS)"),
    )
    assert [f.text for f in outside.hub(Hub(wanted, answers=(read, read, read)))] == [
        "h lets read TOKENIZER: a/b and DATA_MIX: c/d, e/f"
    ]
    assert [f.text for f in outside.hub(Hub(wanted, answers=(away, away, away)))] == [
        "h is out of reach (its name is not found (DNS)), of which the run needs TOKENIZER: a/b and DATA_MIX: c/d, e/f"
    ]
    found = outside.hub(Hub(wanted, answers=(read, gated, gated)))
    assert [finding.level for finding in found] == [PASS, FAIL, FAIL]
    assert "https://h/datasets/c/d" in found[1].fix and "https://h/datasets/e/f" in found[2].fix


# ---- The clock


@pytest.mark.parametrize(
    ("ahead", "kept", "matters", "level", "words"),
    [
        ([0.4], False, True, PASS, "within 1 s of h"),
        ([59.0], None, True, PASS, "within 59 s of h"),
        ([61.0], True, True, WARN, "61 s ahead of h"),
        ([-3600.0], True, False, WARN, "3,600 s behind h"),
        ([900.0, 1.5], None, True, PASS, "within 2 s"),  # one of two servers is wrong itself
        ([None], True, True, PASS, "synchronized"),
        ([], None, True, PASS, "does not tell"),
        ([], False, True, WARN, "no NTP"),
        ([], False, False, PASS, "no NTP"),
    ],
)
def test_the_clock_is_judged(
    ahead: list[float | None], kept: bool | None, matters: bool, level: str, words: str
) -> None:
    finding = outside.clock([None, *(Answer("h", 200, ahead_s=s) for s in ahead)], kept, matters)
    assert finding.level == level and words in finding.text and bool(finding.fix) == (level == WARN)
