"""plan/data_wanted.py: by hand, against what the trainer counts, and without torch or a network."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from plan.data_wanted import Epochs, epochs, findings, sealed
from settings import ROOT, load_config, load_preset
from settings.config import Config
from settings.finding import FAIL, WARN
from tests.conftest import make_data
from train.data import data_paths, prepare
from train.data.sources.source import CorpusError


@pytest.fixture
def xlarge(tmp_path: Path) -> Config:
    return load_config(
        {"PRESET": "xlarge-8xa100", "ENV_FILE": "", "DATA_DIR": str(tmp_path / "nothing")}
    )


def of(tmp_path: Path, **settings: str) -> Config:
    """A run whose shards are random: 16,666 tokens in two, of 10,000 and 6,666."""
    return load_config(
        {
            "ENV_FILE": "",
            "DATA_MIX": "python-stdlib:1",
            "VOCAB_SIZE": "512",
            "SEQ_LEN": "32",
            "BATCH_TOKENS": "512",
            "N_EMBD": "32",
            "MICRO_BATCH_SIZE": "4",
            "N_HEAD": "2",
            "TRAIN_TOKENS": "20480",
            "WARMUP_TOKENS": "0",
            **make_data(tmp_path),
            **settings,
        }
    )


def test_the_labs_mixture_before_anything_is_prepared(xlarge: Config) -> None:
    web, pdf, usmle = epochs(xlarge)
    total = 190_735 * 524_288  # steps of the preset
    assert [e.wanted_tokens for e in (web, pdf, usmle)] == pytest.approx(
        [0.65 * total, 0.34 * total, 0.01 * total]
    )
    assert (web.there_tokens, web.origin) == (
        pytest.approx(0.999 * 100e9),
        "about, by sources/fineweb-edu.toml",
    )
    assert web.epochs == pytest.approx(0.65 / 0.999, rel=1e-5)
    assert pdf.epochs == pytest.approx(0.034 / 0.999, rel=1e-5)
    assert usmle.epochs == pytest.approx(1e9 / (0.98 * 2e6), rel=1e-5)  # about 510
    (said,) = findings(xlarge, [web, pdf, usmle])
    assert (said.name, said.level) == ("epochs", WARN)
    assert said.text.startswith(
        "usmle is repeated 510 times: 1% of 100B tokens are 1B, and it has 1.96M (about"
    ) and said.text.endswith(", as its max_epochs allows")


def test_train_tokens_bounds_what_there_will_be(xlarge: Config) -> None:
    c = dataclasses.replace(xlarge, train_tokens=10**10, max_steps=xlarge.last_step)
    web, pdf, usmle = epochs(c)
    assert (web.there_tokens, pdf.there_tokens) == (6.5e9, 3.4e9)
    assert web.epochs == pytest.approx(10, rel=1e-5)
    assert web.origin == "as many as TRAIN_TOKENS has made, of what sources/fineweb-edu.toml says"
    assert usmle.there_tokens == 1_960_000  # fewer than its hundredth
    said = findings(c, [web])[0]
    assert said.level == WARN and said.text.endswith(
        "; beyond 4 times it is worth less than new text"
    )
    past = dataclasses.replace(xlarge, max_steps=3 * 190_735)
    assert epochs(past)[0].epochs == pytest.approx(
        3, rel=1e-5
    )  # of 100e9 TRAIN_TOKENS has 65e9 made


def test_shards_are_counted_as_the_trainer_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = of(tmp_path)
    there = (9_999 // 32 + 6_665 // 32) * 32  # whole windows, shard by shard
    assert epochs(c) == [
        Epochs("python-stdlib", 20_480, there, "counted in its shards", 20_480 / there, True)
    ]
    shards = prepare.open_sources(c, prepare.vocabulary(c))["python-stdlib"]
    assert epochs(c)[0].epochs == prepare.planned_epochs(c, shards, "python-stdlib")
    found = sealed(c, prepare.source_of(c, "python-stdlib"))
    assert (
        found
        and found.whole
        and found.size == sum(path.stat().st_size for path in shards.folder.glob("*.bin"))
    )
    assert findings(c, epochs(c)) == []
    monkeypatch.setattr(data_paths, "MAX_EPOCHS", 1)  # a limit below what is warned of
    assert findings(c, epochs(c))[0].level == FAIL


@pytest.mark.parametrize(
    ("steps", "most", "level"),
    [("120", 16, None), ("200", 16, WARN), ("600", 16, FAIL), ("600", 100, WARN)],
)
def test_what_is_said_is_what_preparing_says(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    steps: str,
    most: int,
    level: str | None,
) -> None:
    monkeypatch.setattr(data_paths, "MAX_EPOCHS", most)
    c = of(tmp_path, MAX_STEPS=steps)
    found = findings(c, epochs(c))
    assert [f.level for f in found] == ([level] if level else [])
    try:
        prepare.refuse_repetition(c, prepare.open_sources(c, prepare.vocabulary(c)))
        said = caplog.text
    except prepare.DataError as error:
        assert level == FAIL
        said = str(error)
        assert found[0].fix in said and found[0].fix.endswith("in sources/python-stdlib.toml")
    assert bool(said) == bool(found)
    if found:
        begins, has, ends = found[0].text.partition(" (counted in its shards)")
        assert has and begins in said and ends in said


def test_shards_that_are_not_all_made_do_not_count(tmp_path: Path) -> None:
    c = of(tmp_path)
    (manifest,) = tmp_path.glob("python-stdlib/*/*/manifest.json")
    content = json.loads(manifest.read_text()) | {"schema": 2}  # which has no hash
    del content["hash"]
    manifest.write_text(json.dumps(content | {"end": None}))
    assert epochs(c)[0].there_tokens == 3_700_000 * 0.95
    manifest.write_text("{")  # make data-verify says what is wrong
    assert not epochs(c)[0].counted


def test_other_shards_than_this_runs_do_not_count(tmp_path: Path) -> None:
    c = of(tmp_path)
    other = tmp_path / "other.json"
    other.write_text(Path(c.tokenizer).read_text() + " ")
    assert not epochs(dataclasses.replace(c, tokenizer=str(other)))[0].counted
    assert not epochs(dataclasses.replace(c, tokenizer="train"))[0].counted  # was not trained yet
    assert epochs(dataclasses.replace(c, data_dir=str(tmp_path / "elsewhere")))[0].counted is False


def test_a_source_of_unknown_size_has_no_epochs(tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "papers.toml").write_text(
        'files = ["papers/*.txt"]\nvalidation_fraction = 0.1\n'
    )
    c = load_config(
        {
            "ENV_FILE": "",
            "DATA_MIX": "papers:1",
            "DATA_DIR": str(tmp_path),
        }
    )
    (found,) = epochs(c)
    assert (found.there_tokens, found.epochs) == (None, None)
    assert found.origin == "size unknown: sources/papers.toml has no `tokens`"
    assert findings(c, [found]) == []
    with pytest.raises(CorpusError, match="DATA_MIX names wiki"):
        epochs(dataclasses.replace(c, data_mix="wiki:1"))


def test_it_needs_neither_torch_nor_a_tokenizer_and_without_shards_no_numpy() -> None:
    code = (
        "import sys; from plan import data_wanted as data; from settings import load_config; "
        "data.epochs(load_config({'PRESET': 'xlarge-8xa100', 'ENV_FILE': '', 'DATA_DIR': 'no-such-folder'})); "
        "sys.exit(bool({'torch', 'tokenizers', 'pyarrow', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_little_text_of_ones_own_suits_a_smaller_model(tmp_path: Path) -> None:
    path = tmp_path / "novel.txt"
    path.write_text("line\n" * 70_000)  # 350 kB: about 100,000 tokens, a twentieth of them held out
    settings = {"PRESET": "tiny", "TRAIN_TOKENS": "1224704", "DATA": str(path)}
    settings["DATA_DIR"] = str(tmp_path / "data")
    c = load_preset(**settings)
    (found,) = epochs(c)
    assert found.there_tokens == pytest.approx(95_000)
    (said,) = findings(c, [found])
    assert said.level == WARN
    assert said.text.startswith("novel is repeated 12.9 times: 1.22M tokens are wanted, and it has")
    # Four passes of 95,000 tokens at 20 for each parameter.
    assert "For this much text a model of 19,000 parameters would be enough (20 tokens" in said.fix
    assert said.fix.endswith("this one has 3,344,448")
    small = c.replace(n_layer=1, n_embd=4, n_head=1, vocab_size=300).derived()
    (said,) = findings(small, epochs(small))
    assert said.fix == ""
