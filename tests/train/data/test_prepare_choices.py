"""train/data/prepare.py: what is left to stream, when a source is finished, and how often its text may be repeated."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from settings.config import Config
from tests.train.data.test_prepare import config, opened, settings, web
from train.data import data_paths, prepare
from train.data.manifest import DataError
from train.data.sources import pin

__all__ = ["config", "web"]  # fixtures


# ---- What is made, and what streams


def streams(c: Config) -> dict[str, bool]:
    """By DATA_STREAM."""
    return {
        how: prepare.streams(dataclasses.replace(c, data_stream=how), prepare.vocabulary(c))
        for how in ("auto", "0", "1")
    }


def finished(c: Config) -> dict[str, bool]:
    return {name: prepare.is_finished(c, name, prepare.vocabulary(c)) for name in c.mixture}


def test_what_is_on_the_hub_and_has_no_shards_streams(web: Config) -> None:
    pin.pin(prepare.source_of(web, "papers"), Path(web.data_dir) / "papers")
    assert finished(web) == {"web": False, "papers": False}
    assert streams(web) == {"auto": True, "0": False, "1": True}
    local = dataclasses.replace(web, data_mix="papers:1")
    assert streams(local) == {"auto": False, "0": False, "1": True}
    prepare.prepare(local)
    assert finished(web) == {"web": False, "papers": True}
    assert streams(local) == {"auto": False, "0": False, "1": False}
    assert streams(web) == {"auto": True, "0": False, "1": True}
    prepare.prepare(web, whole=True)
    assert finished(web) == {"web": True, "papers": True}
    assert streams(web) == {"auto": False, "0": False, "1": False}


def test_other_nodes_than_the_first_make_nothing_and_ask_no_hub(
    web: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def asked(*_: Any, **__: Any) -> None:
        raise AssertionError("a node that is not the first")

    other = dataclasses.replace(
        web, nodes=2, node_rank=1, master_addr="a", data_dir=str(tmp_path / "other")
    )
    for name in ("pin", "vocabulary", "make_source", "source_of"):
        monkeypatch.setattr(prepare, name, asked)
    for whole in (False, True):
        prepare.prepare(other, whole=whole)
    assert [path.name for path in (tmp_path / "other").rglob("*") if path.is_file()] == 3 * [
        ".lock"
    ]
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="DATA_DIR"):
        prepare.prepare(dataclasses.replace(other, data_dir=str(tmp_path / "file")))


def test_a_source_is_finished_when_its_limit_is_reached_and_every_file_is_there(
    web: Config,
) -> None:
    prepare.prepare(web, whole=True)
    folder = opened(web, "web").folder
    assert finished(dataclasses.replace(web, train_tokens=3900))["web"]
    more = dataclasses.replace(web, train_tokens=6000)
    assert finished(more) == {"web": False, "papers": True} and streams(more)["auto"]
    for name in ("train_00001.bin", "validation_00000.bin"):
        (folder / name).rename(folder / "away")
        assert finished(web) == {"web": False, "papers": True} and streams(web)["auto"]
        (folder / "away").rename(folder / name)
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(manifest.replace('"end": "limit"', '"end": null'))
    assert not finished(web)["web"]
    for wrong in ("", "[]", "{}", "<html>"):  # opening it says what is wrong
        (folder / "manifest.json").write_text(wrong)
        assert finished(web)["web"]
        with pytest.raises(DataError, match=r"manifest\.json: not a manifest .*make data"):
            prepare.prepare(web, whole=True)


@pytest.mark.parametrize(("argv", "made"), [([], set()), (["data"], {"web", "papers"})])
def test_make_train_leaves_to_the_stream_what_make_data_makes(
    web: Config,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    argv: list[str],
    made: set[str],
) -> None:
    settings(monkeypatch, web)
    caplog.set_level(logging.INFO)
    assert prepare.main(argv) == 0
    assert {
        path.parent.parent.parent.name for path in Path(web.data_dir).rglob("train_*.bin")
    } == made
    said = "data: web, papers will be streamed while the run trains; make data prepares all of it beforehand"
    assert (said in caplog.messages) is not made


def test_a_run_that_streams_has_not_begun_until_each_source_has_both_splits(web: Config) -> None:
    prepare.prepare(web)  # the pins
    v = prepare.vocabulary(web)
    assert prepare.not_begun(web, v, {}) == "web"
    maker = prepare.maker_of(web, "web", v)
    sealed = []
    for seal in maker.make(3000):
        sealed.append(seal)
        both = all(
            any(getattr(seal, split) for seal in sealed) for split in ("train", "validation")
        )
        assert prepare.not_begun(web, v, {}) == ("papers" if both else "web")
    assert len(sealed) > 2
    prepare.prepare(dataclasses.replace(web, data_mix="papers:1"))
    assert prepare.not_begun(web, v, {}) == ""


# ---- Repetition


def shards_of(tokens: int, shard_tokens: int = 100_000_000, ended: bool = True) -> Any:
    """As much of a ShardSet as is asked for its size."""
    sizes = [shard_tokens] * (tokens // shard_tokens) + [tokens % shard_tokens]
    return SimpleNamespace(
        ended=ended, windows=lambda split, seq_len: [max(0, n - 1) // seq_len for n in sizes]
    )


def refusal(c: Config, sources: dict[str, Any]) -> str:
    try:
        prepare.refuse_repetition(c, sources)
    except DataError as error:
        return str(error)
    return ""


@pytest.fixture
def declare_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Declares sources by name, with a line about max_epochs or none."""
    monkeypatch.setattr(data_paths, "source_folders", lambda c: [tmp_path])

    def declare_all(**lines: str) -> None:
        for name, line in lines.items():
            text = f'files = ["x.jsonl"]\nvalidation_fraction = 0.1\n{line}\n'
            (tmp_path / f"{name}.toml").write_text(text)

    return declare_all


@pytest.mark.parametrize(
    ("epochs", "outcome"), [(3.9, ""), (4.1, "warned"), (15.9, "warned"), (16.1, "refused")]
)
def test_text_that_is_repeated_often_is_warned_of_and_then_refused(
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    declare_most: Callable[..., None],
    epochs: float,
    outcome: str,
) -> None:
    c = dataclasses.replace(
        Config(),
        data_mix="notes:1,papers:3",
        seq_len=100,
        batch_tokens=1000,
        train_tokens=4_000_000,
    )
    declare_most(notes="", papers="")
    sources = {"papers": shards_of(2_999_901), "notes": shards_of(100 * round(10_000 / epochs) + 1)}
    said = refusal(c, {name: sources[name] for name in c.mixture})
    what = (
        f"notes is repeated {10_000 / round(10_000 / epochs):,.1f} times: 25% of 4,000,000 tokens are 1,000,000, "
        f"and it has {100 * round(10_000 / epochs):,}"
    )
    remedy = f'max_epochs = "unlimited" in {tmp_path}/notes.toml'
    assert said.startswith(what) is (outcome == "refused")
    assert said.endswith(remedy) is (outcome == "refused")
    assert any(what in message for message in caplog.messages) is (outcome == "warned")
    for most in ('"unlimited"', "17"):
        caplog.clear()
        declare_most(notes=f"max_epochs = {most}")
        assert refusal(c, sources) == ""
        assert [
            message == f"warning: {what}, as its max_epochs allows" for message in caplog.messages
        ] == [True] * bool(outcome)
    declare_most(notes="max_epochs = 15")
    assert bool(refusal(c, sources)) is (epochs > 15)


def test_all_that_must_be_allowed_are_named(
    caplog: pytest.LogCaptureFixture, declare_most: Callable[..., None]
) -> None:
    c = dataclasses.replace(
        Config(),
        data_mix="a:1,b:1,c:1,d:1",
        seq_len=100,
        batch_tokens=1000,
        train_tokens=4_000_000,
    )
    unlimited = 'max_epochs = "unlimited"'
    declare_most(a="", b=unlimited, c="", d="")
    sources = {name: shards_of(1001 if name != "d" else 10**6) for name in c.mixture}
    said = refusal(c, sources)
    first, second = said.splitlines()
    assert first.startswith("a is repeated") and first.endswith("/a.toml")
    assert second.startswith("c is repeated") and second.endswith("/c.toml")
    declare_most(a=unlimited, c=unlimited)
    assert refusal(c, sources) == ""


def test_of_a_source_that_is_still_being_made_nothing_is_known(
    declare_most: Callable[..., None],
) -> None:
    c = dataclasses.replace(Config(), data_mix="a:1", train_tokens=10**9)
    declare_most(a="")
    assert refusal(c, {"a": shards_of(10_000, ended=False)}) == ""
    assert "a is repeated" in refusal(c, {"a": shards_of(10_000)})
