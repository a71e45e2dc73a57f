"""What stands beside exported weights: the tokenizer encodes as ours does, and the card says what is known."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, processors

from export import card, files
from settings.config import Config
from tests.conftest import SHARED
from tests.export.exported import QWEN, Run, make_run
from tests.export.test_export import tokenizer_of
from tests.train.data.test_tokenizer import AWKWARD, KINDS, byte_level, some_text
from tests.train.model.test_model import recipe
from train.data import tokenizer
from train.data.tokenizer import Vocabulary

PLAIN = [
    "The quick brown fox",
    *AWKWARD,
    "\u00a0no\u2003break\u3000",
    "  x",
    "a\r\n\r\n\tb",
    "\ufb01\u0301\u200b",
    "0" * 50,
    "'s't",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "\u0627\u0644\u0639 \u05e9\u05dc",
    "<s></s><eos>",
    "<|end|><|pad|> <|system|>\n<|assistant|>",
    *some_text()[:2],
]


def written(folder: Path, made: Tokenizer, c: Config) -> Vocabulary:
    """A tokenizer as a run has it, and beside it what an export writes of it."""
    (folder / "run.json").write_text(made.to_str())
    v = tokenizer.load(folder / "run.json")
    (folder / "tokenizer.json").write_bytes(
        files.tokenizer_json((folder / "run.json").read_bytes())
    )
    for name, content in (
        ("tokenizer_config", files.tokenizer_config(c, v, None)),
        ("config", files.config_json(c, v, "float32", 1e-5)),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return v


def check_ids(folder: Path, v: Vocabulary) -> None:
    """Of plain text through transformers, and with the one switch that ours has on also where it spells tokens out."""
    theirs, as_text = tokenizer_of(folder), tokenizer_of(folder, split_special_tokens=True)
    spelled = re.compile("|".join(map(re.escape, files.special_tokens(v))))
    for text in PLAIN:
        assert (
            as_text(text).input_ids
            == as_text.encode(text, add_special_tokens=False)
            == v.encode(text)
        )
        assert theirs(text, split_special_tokens=True).input_ids == v.encode(text)
        if not spelled.search(text):
            assert theirs(text).input_ids == v.encode(text)
            assert theirs.decode(v.encode(text)) == v.decode(v.encode(text))
    assert theirs.bos_token_id == theirs.eos_token_id == v.end_of_text
    assert theirs(theirs.bos_token).input_ids[-1] == v.end_of_text


# ---- Tokenizers


def test_a_tokenizer_trained_here_encodes_through_transformers_as_through_ours(
    tiny: Config, tmp_path: Path
) -> None:
    made = tokenizer.train(iter(some_text()), 500, tmp_path / "made.json").tokenizer
    v = written(tmp_path, made, tiny)
    assert (tmp_path / "tokenizer.json").read_bytes() == (tmp_path / "run.json").read_bytes()
    check_ids(tmp_path, v)
    theirs = tokenizer_of(tmp_path)
    assert (theirs.pad_token, theirs.model_max_length) == ("<|pad|>", tiny.seq_len)
    assert theirs("<|end|>").input_ids == [
        v.tokenizer.token_to_id("<|end|>")
    ]  # as a chat's template needs it
    assert theirs.decode([v.end_of_text, *v.encode("ab")], skip_special_tokens=True) == "ab"
    assert tokenizer_of(tmp_path, add_bos_token=True)("ab").input_ids == [
        v.end_of_text,
        *v.encode("ab"),
    ]


@pytest.mark.parametrize(
    "qk_norm", [False, True], ids=["Llama", "Qwen3"]
)  # transformers chooses a class by it
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_that_is_taken_encodes_alike(
    tiny: Config, tmp_path: Path, kind: str, qk_norm: bool
) -> None:
    v = written(tmp_path, KINDS[kind][0](), recipe(tiny, qk_norm=qk_norm))
    check_ids(tmp_path, v)


def test_the_tokenizer_of_gpt2_stays_as_it_is(tiny: Config, tmp_path: Path) -> None:
    """So that llama.cpp, which knows tokenizers by the ids they give a text, knows it."""
    path = SHARED / "tokenizers" / "gpt2" / "tokenizer.json"
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    v = written(tmp_path, Tokenizer.from_file(str(path)), tiny)
    check_ids(tmp_path, v)
    assert files.tokenizer_json(path.read_bytes()) == path.read_bytes()
    assert tokenizer_of(tmp_path)("Hello world").input_ids == [15496, 995]


def test_what_would_cut_pad_or_add_is_taken_out(tiny: Config, tmp_path: Path) -> None:
    """As Llama 3 puts a token before a text which our training never saw there."""
    made = byte_level(add_prefix_space=False)
    made.add_special_tokens(["<begin>"])
    made.post_processor = processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", made.token_to_id("<begin>"))]
    )
    made.enable_truncation(5)
    made.enable_padding(length=9)
    assert len(made.encode("abc def ghi abc def").ids) == 9
    v = written(tmp_path, made, tiny)
    check_ids(tmp_path, v)
    kept = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert kept.get_vocab() == made.get_vocab() and kept.truncation is None and kept.padding is None


# ---- The model card


@pytest.fixture
def run(tiny: Config, tmp_path: Path, data: dict[str, str]) -> Run:
    c = recipe(tiny, **QWEN, tokenizer=data["TOKENIZER"], data_mix="fineweb-edu:3,python-stdlib:1")
    return make_run(tmp_path, c)


def text_of(run: Run, monkeypatch: pytest.MonkeyPatch) -> tuple[dict, str, dict[str, str]]:
    """(the head, the rest, the table of the training) of a card."""
    assert run.command(monkeypatch) == 0
    _, head, text = (run.export / "README.md").read_text().split("---\n", 2)
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE))
    return yaml.safe_load(head), text, rows


def test_a_card_says_what_is_known_and_n_a_of_the_rest(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, text, rows = text_of(run, monkeypatch)
    assert head == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "model_name": "a-run",
        "tags": ["qwen3", "pytorch"],
        "datasets": ["HuggingFaceFW/fineweb-edu"],
    }
    config = run.config
    weights = dict(run.models[3].named_parameters())
    tokens = 3 * config.batch_tokens
    assert rows["parameters"] == f"{sum(it.numel() for it in weights.values()):,}"
    assert rows["tokens"] == f"{tokens:,}"
    matrices = sum(
        it.numel() for name, it in weights.items() if it.ndim == 2 and "embed" not in name
    )
    flops = tokens * (6 * matrices + 12 * config.n_layer * config.n_embd * config.seq_len)
    assert rows["compute"].startswith(f"{flops:.3g} FLOPs")
    assert rows["hardware"] == "2 x NVIDIA H100"
    assert rows["code"] == "aaaaaaaaaaaa and uncommitted changes"
    assert rows["time"] == rows["GPU energy"] == "n/a"
    assert "n/a: neither the run nor `make eval`" in text
    assert f"| 75.00% | {round(tokens * 0.75):,} |\n" in text
    assert "License: n/a" in text and "N_KV_HEAD=2\n" in text
    assert "secret-host" not in text and str(run.folder.parent) not in text


@pytest.mark.parametrize(
    ("tokenizer", "is_shown"),
    [
        ("openai-community/gpt2", True),
        ("../models/tokenizer.json", False),
        ("/srv/models/tokenizer.json", False),
    ],
)
def test_a_card_names_repositories_of_the_hub_and_no_path(
    tiny: Config, tokenizer: str, is_shown: bool
) -> None:
    names = {line.split("=")[0] for line in card.changed_settings(tiny)}
    assert names.isdisjoint({"N_KV_HEAD", "MLP_DIM"})  # defaults that follow from others
    changed = recipe(tiny, tokenizer=tokenizer, init_from="models/llama", data="my.txt")
    lines = card.changed_settings(changed)
    assert (f"TOKENIZER={tokenizer}" in lines) is is_shown
    assert not [line for line in lines if "models" in line or "my.txt" in line]


def test_a_card_has_counts_and_evaluations_of_this_step_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {"schema": 1, "host": "h", "attempt": 0, "mono_s": 1.0, "time": 1.7e9, "tokens": 512}
    step = {"event": "step", "loss": 2.0, "lr": 1e-3, "grad_norm": 1.0, "step_ms": 10.0}
    step |= {"tokens_per_s": 1.0, "mfu": None, "mem_gib": 1.0}
    records = [
        {"event": "start", "step": 0, "startup_s": {}, "changes": {}, "world_size": 1},
        *(step | {"step": number, "mono_s": 1.0 + number} for number in (1, 2, 3)),
        {"event": "eval", "step": 2, "val_loss": 9.0, "val_bpb": 8.0},
        {"event": "eval", "step": 3, "val_loss": 3.5, "val_bpb": 1.25, "full": True},
    ]
    (run.folder / "metrics.jsonl").write_text(
        "".join(json.dumps(common | record) + "\n" for record in records)
    )
    task = {"accuracy": 0.375, "shots": 10, "file": "/srv/arc.jsonl"}
    measured = {
        "step": 3,
        "val_bpb": 1.125,
        "seconds": 987.0,
        "core": {"tasks": {"arc_easy": task}},
        "provenance": {"host": "secret-host"},
    }
    asked = {"right": 38, "asked": 40}
    chat = {"step": 3, "written": asked, "choice": {"right": 0, "asked": 0}}
    chat["by_source"] = {"/srv/questions.jsonl": {"written": asked}}
    (run.folder / "eval").mkdir()
    for name, content in (
        ("step_0000003.json", measured),
        ("step_0000002.json", {"step": 2, "val_bpb": 0.99}),
        ("chat_step_0000003.json", chat),
        ("bad.json", []),
    ):
        (run.folder / "eval" / name).write_text(json.dumps(content))
    _, text, rows = text_of(run, monkeypatch)
    assert rows["val_loss"] == "3.5000" and "| val_bpb | 1.2500 |" in text
    assert rows["val_bpb"] == "1.1250" and rows["core tasks arc_easy accuracy"] == "0.3750"
    assert rows["core tasks arc_easy shots"] == "10"
    assert (rows["written right"], rows["written asked"]) == ("38", "40")
    for other in ("8.0", "0.99", "987", "secret-host", "/srv", "choice"):
        assert other not in text
    assert rows["time"].startswith("0:0")


def test_energy_is_that_of_the_samples_and_says_how_much_they_cover() -> None:
    run: Any = SimpleNamespace(columns={"step": [5, 7]})
    energy: Any = SimpleNamespace(kwh=12.3456, coverage=0.987)
    about = card.About(Config(), {"checkpoint": {"step": 7}}, {}, run, energy, [])
    assert card.describe_energy(about) == "12.35 kWh; samples cover 98.7% of the GPU time"
    about = dataclasses.replace(about, facts={"checkpoint": {"step": 5}})
    assert card.describe_energy(about).startswith("12.35 kWh up to step 7;")


# ---- What there is nothing to export of


def test_a_folder_of_weights_is_exported_already(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.command(monkeypatch) == 0
    assert run.command(monkeypatch, RUN_NAME="another", INIT_FROM=run.export) == 64
    assert "Is in Hugging Face format already" in capsys.readouterr().err
    assert run.command(monkeypatch, RUN_NAME="another") == 78
    assert "There is no run " in capsys.readouterr().err
    assert run.command(monkeypatch, DTYPE="float16") == 64
    assert (
        "DTYPE=float16 (environment): Must be one of float32, bfloat16" in capsys.readouterr().err
    )
