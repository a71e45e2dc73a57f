"""`make export`: what transformers loads computes what the checkpoint does, bit for bit."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from export import convert as command
from export import place, weight_files
from export.stored import Weights
from settings import ROOT
from settings.config import SETTINGS, Config
from tests.export.exported import LLAMA, QWEN, Run, make_run
from tests.train.model.test_hf_import import logits
from tests.train.model.test_model import recipe
from train.checkpoint import find
from train.checkpoint.manifest import CheckpointError
from train.data import tokenizer
from train.model import hf_import
from train.model.generate import continue_text
from train.model.model import build

CPU = torch.device("cpu")
SHAPES = [
    LLAMA,
    {"tie_embeddings": False, "n_kv_head": 1, "rope_theta": 123456.7},
    QWEN,
    {**QWEN, "tie_embeddings": True, "vocab_size": 513, "norm_eps": 3e-7},
]


@pytest.fixture
def run(tiny: Config, tmp_path: Path, data: dict[str, str]) -> Run:
    return make_run(tmp_path, recipe(tiny, **QWEN, tokenizer=data["TOKENIZER"]))


def model_of(folder: Path, **how: object) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **how).eval()


def tokenizer_of(folder: Path, **how: object):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **how)


def digest(folder: Path) -> dict[str, str]:
    return {path.name: weight_files.sha256_of(path) for path in folder.iterdir()}


# ---- What transformers computes


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_transformers_computes_the_same_logits_and_writes_the_same_text(
    tiny: Config,
    tmp_path: Path,
    data: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict,
) -> None:
    shape = {name: value for name, value in changes.items() if name != "norm_eps"}
    config = recipe(tiny, tokenizer=data["TOKENIZER"], **shape)
    made = make_run(tmp_path, config, norm_eps=changes.get("norm_eps"))
    config, model = made.config, made.models[3]
    assert made.command(monkeypatch) == 0
    theirs, words = model_of(made.export), tokenizer_of(made.export)
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM")
    expected = logits(model, config)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits(theirs, config), expected, rtol=1e-5, atol=1e-5)
    assert {weight.dtype for weight in theirs.parameters()} == {torch.float32}
    vocabulary = tokenizer.load(Path(config.tokenizer))
    prompt = "abcd def"
    ids = words(words.bos_token + prompt, return_tensors="pt").input_ids
    assert ids[0].tolist() == [vocabulary.end_of_text, *vocabulary.encode(prompt)]
    text = continue_text(model, vocabulary, prompt, 12, seed=1, temperature=0)
    found = theirs.generate(ids, max_new_tokens=12, do_sample=False)[0]
    assert words.decode(found, skip_special_tokens=True) == text and len(text) > len(prompt)


def test_the_head_is_written_once_if_it_is_tied_and_padding_never(
    tiny: Config, tmp_path: Path, data: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_run(tmp_path, recipe(tiny, tokenizer=data["TOKENIZER"], **LLAMA, vocab_size=513))
    assert made.command(monkeypatch) == 0
    found = load_file(made.export / "model.safetensors")
    weights = dict(made.models[3].named_parameters())
    assert weights["embed_tokens.weight"].shape == (640, 64)
    assert found.keys() == {f"model.{name}" for name in weights}
    for name, weight in weights.items():
        rows = 513 if "embed" in name else len(weight)
        assert torch.equal(weight[:rows], found[f"model.{name}"])


def test_several_files_in_bfloat16_have_an_index_and_each_weight_rounded(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "EXPORT_SHARD_GB", 0.00005)  # 50 kB
    assert run.command(monkeypatch, DTYPE="bfloat16") == 0
    index = json.loads((run.export / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in run.export.glob("*.safetensors"))
    assert len(files) > 3 and set(index["weight_map"].values()) == set(files)
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    whole = {}
    for name in files:
        part = load_file(run.export / name)
        size = sum(weight.numel() * 2 for weight in part.values())
        assert size <= 50_000 or len(part) == 1
        assert all(index["weight_map"][key] == name for key in part)
        whole |= part
    count = sum(weight.numel() for weight in whole.values())
    assert index["metadata"] == {"total_size": 2 * count, "total_parameters": count}
    for name, weight in run.models[3].named_parameters():
        assert torch.equal(weight.to(torch.bfloat16), whole[hf_import.their_name(name)])
    assert next(model_of(run.export).parameters()).dtype == torch.bfloat16  # by config.json


@pytest.mark.parametrize(
    ("changes", "file_gb"),
    [({**LLAMA, "vocab_size": 513}, 0.0001), (QWEN, 5)],
    ids=["Llama in several files", "Qwen3"],
)
def test_a_run_that_starts_from_an_export_has_the_same_bits(
    tiny: Config,
    tmp_path: Path,
    data: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict,
    file_gb: float,
) -> None:
    monkeypatch.setattr(weight_files, "EXPORT_SHARD_GB", file_gb)
    made = make_run(tmp_path, recipe(tiny, tokenizer=data["TOKENIZER"], **changes))
    assert made.command(monkeypatch) == 0
    other = build(dataclasses.replace(made.config, seed=99), CPU)
    hf_import.load(made.export, other)
    ours = dict(made.models[3].named_parameters())
    for name, weight in other.named_parameters():
        rows = made.config.vocab_size if name in hf_import.OF_ENTRIES else len(weight)
        assert torch.equal(weight[:rows], ours[name][:rows])
    # Shards that were made with the tokenizer are found by its hash.
    assert (
        tokenizer.load(made.export / "tokenizer.json").sha256
        == tokenizer.load(Path(data["TOKENIZER"])).sha256
    )


def test_a_conversation_has_our_ids_and_a_reply_ends(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.command(monkeypatch) == 0
    words, vocabulary = tokenizer_of(run.export), tokenizer.load(run.export / "tokenizer.json")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " abc\n def?"},
        {"role": "assistant", "content": "hgf"},
        {"role": "user", "content": "\u65e5 \u00e9"},
    ]
    found = words.apply_chat_template(messages, return_dict=False, add_generation_prompt=True)
    special = vocabulary.tokenizer.token_to_id
    ids = [vocabulary.end_of_text]
    for message in messages:
        ids += [special(f"<|{message['role']}|>"), *vocabulary.encode(message["content"])]
        ids.append(special("<|end|>"))
    assert found == [*ids, special("<|assistant|>")]
    ends = json.loads((run.export / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [vocabulary.end_of_text, special("<|end|>")]
    facts = json.loads((run.export / "export.json").read_text())
    assert facts == {"schema": 1, "run": "a-run", "step": 3, "stop_token": "<|end|>"}
    assert "chat template" in (run.export / "README.md").read_text()


# ---- Which checkpoint, and what is replaced


@pytest.fixture
def made(tiny: Config, tmp_path: Path, data: dict[str, str]) -> Run:
    """A run with checkpoints of steps 3 and 5."""
    return make_run(tmp_path, recipe(tiny, tokenizer=data["TOKENIZER"]), steps=(3, 5))


def test_the_newest_checkpoint_is_exported_or_that_of_step(
    made: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    def exports(step: int) -> bool:
        found = load_file(made.export / "model.safetensors")["model.norm.weight"]
        return torch.equal(found, made.models[step].norm.weight)

    assert made.command(monkeypatch) == 0
    assert "step 5" in capsys.readouterr().out and exports(5)
    assert place.read_facts(made.export)["step"] == 5
    assert made.command(monkeypatch, STEP="3") == 0 and exports(3)
    assert place.read_facts(made.export)["step"] == 3
    names = sorted(path.name for path in made.folder.iterdir())
    assert names == [".export", "checkpoints", "config.json", "empty.env", "export"]
    assert made.command(monkeypatch, STEP="4") == 64
    assert "STEP=4: Run a-run has no checkpoint of that step" in capsys.readouterr().err
    (made.folder / "checkpoints" / "step_0000005" / "__0_0.distcp").write_bytes(b"damaged")
    assert made.command(monkeypatch, STEP="5") == 78
    assert "__0_0.distcp is damaged" in capsys.readouterr().err
    assert made.command(monkeypatch) == 0 and exports(3)  # the newest that is whole


def test_an_export_that_was_edited_is_not_replaced(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.command(monkeypatch) == 0
    (run.export / "LICENSE").write_text("mine")
    with open(run.export / "README.md", "a") as file:
        file.write("my own words\n")
    before = digest(run.export)
    assert run.command(monkeypatch) == 78
    assert "LICENSE, README.md: Was edited, or no export wrote it" in capsys.readouterr().err
    assert digest(run.export) == before


def test_an_export_that_a_run_was_fine_tuned_from_stays(
    made: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert made.command(monkeypatch, STEP="3") == 0
    first = digest(made.export)
    model = weight_files.fingerprint(made.export)
    for name, content in (("bad", "{"), ("new", '{"settings": {}}')):  # neither needs an export
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    assert made.command(monkeypatch) == 0
    assert not list(made.folder.glob("export-*"))

    assert made.command(monkeypatch, STEP="3") == 0
    tuned = tmp_path / "tuned" / "site_1"
    tuned.mkdir(parents=True)
    attempts = {"settings": {}, "attempts": [{"model_fingerprint": model}]}
    (tuned / "config.json").write_text(json.dumps(attempts))
    earlier = made.folder / f"export-{model}"
    assert made.command(monkeypatch, STEP="3") == 0  # of the same weights one is enough
    assert not earlier.exists()
    capsys.readouterr()
    assert made.command(monkeypatch) == 0
    assert (
        f"The earlier export is now {earlier}, because these runs were fine-tuned from it: tuned/site_1."
        in capsys.readouterr().err
    )
    assert digest(earlier) == first
    assert place.read_facts(made.export)["step"] == 5
    assert made.command(monkeypatch, STEP="3") == 0
    assert made.command(monkeypatch) == 0
    assert list(made.folder.glob("export-*")) == [earlier]
    assert digest(earlier) == first


@pytest.mark.parametrize("point", ["weights", "seal", "before the renames", "between the renames"])
def test_a_killed_export_leaves_the_earlier_one_and_the_next_one_cleans_up(
    run: Run, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    assert run.command(monkeypatch) == 0
    before = digest(run.export)

    class Killed(BaseException):
        """Nothing cleans up after it, as after SIGKILL."""

    def die(*_: object, **__: object) -> None:
        patch.setattr(place, "clear", lambda _: None)
        raise Killed

    with monkeypatch.context() as patch:
        if point == "weights":
            patch.setattr(weight_files.os, "fsync", die)
        elif point == "seal":
            patch.setattr(place, "flush_folder", die)
        elif point == "before the renames":
            patch.setattr(place, "replace", die)
        else:
            rename = os.rename
            patch.setattr(
                place.os, "rename", lambda a, b: die() if b == run.export else rename(a, b)
            )
        with pytest.raises(Killed):
            run.command(patch, DTYPE="bfloat16")
    incomplete = [path for path in run.folder.glob(".*") if path.is_dir()]
    assert incomplete and run.export.exists() == (point != "between the renames")
    place.clear(run.folder)
    assert digest(run.export) == before
    assert not [path for path in run.folder.glob(".*") if path.is_dir()]


@pytest.mark.parametrize(
    ("number", "point"),
    [(signal.SIGINT, "weights"), (signal.SIGTERM, "between the renames")],
    ids=["SIGINT", "SIGTERM"],
)
def test_an_interrupted_export_cleans_up_itself(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    point: str,
) -> None:
    assert run.command(monkeypatch) == 0
    before = digest(run.export)
    rename = os.rename

    def interrupt(*_: object) -> None:
        signal.raise_signal(number)

    with monkeypatch.context() as patch:
        if point == "weights":
            patch.setattr(weight_files.os, "fsync", interrupt)
        else:
            patch.setattr(
                place.os,
                "rename",
                lambda a, b: interrupt() if a.name.startswith(".export-") else rename(a, b),
            )
        assert run.command(patch, DTYPE="bfloat16") == 130
    assert "Interrupted. Nothing was exported" in capsys.readouterr().err
    assert digest(run.export) == before
    assert not [path for path in run.folder.glob(".*") if path.is_dir()]


def test_two_exports_of_a_run_do_not_meet(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with place.lock(run.folder):
        assert run.command(monkeypatch) == 78
    assert "Another process exports this run" in capsys.readouterr().err and not run.export.exists()


# ---- What is checked


def test_a_disk_without_room_is_refused_before_anything_is_written(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(place.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**24))
    assert run.command(monkeypatch) == 78
    assert "The export takes 17.5 MB of disk; 16.8 MB are free" in capsys.readouterr().err
    assert not run.export.exists() and not list(run.folder.glob(".export-*"))


def test_a_full_disk_leaves_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    monkeypatch.setattr(weight_files.os, "fsync", full)
    assert run.command(monkeypatch) == 78
    assert "model.safetensors: Cannot be read or written (No space" in capsys.readouterr().err
    assert not run.export.exists() and not list(run.folder.glob(".export-*"))


def test_a_bit_that_flips_on_its_way_to_the_disk_is_noticed(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = command.write_beside

    def flip(folder: Path, *rest: Any) -> None:
        content = bytearray((folder / "model.safetensors").read_bytes())
        content[-5] ^= 4  # in the last weight, the head
        (folder / "model.safetensors").write_bytes(content)
        write(folder, *rest)

    monkeypatch.setattr(command, "write_beside", flip)
    assert run.command(monkeypatch) == 78
    assert "model.safetensors: What the disk holds is not what" in capsys.readouterr().err
    assert not run.export.exists() and not list(run.folder.glob(".export-*"))


def test_weights_that_are_not_finite_are_refused(
    tiny: Config,
    tmp_path: Path,
    data: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def spoil(config: Config, *_: object, **__: object) -> torch.nn.Module:
        model = build(config, CPU)
        model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
        return model

    with monkeypatch.context() as patch:
        patch.setattr("tests.export.exported.build", spoil)
        made = make_run(tmp_path, recipe(tiny, tokenizer=data["TOKENIZER"]))
    assert made.command(monkeypatch) == 78
    printed = capsys.readouterr().err
    assert "model.layers.1.mlp.up_proj.weight holds values" in printed and "STEP" in printed
    assert not made.export.exists()


def test_sha256sum_accepts_the_sums_of_all_files(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.command(monkeypatch) == 0
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(check, cwd=run.export, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    names = {line.removesuffix(": OK") for line in done.stdout.splitlines()}
    assert names == {path.name for path in run.export.iterdir()} - {"SHA256SUMS"}


def test_no_moment_is_read_and_a_checkpoint_that_vanishes_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = find.folder_of(run.folder / "checkpoints", 3)
    weights, asked = Weights(folder), []
    inner = type(weights.reader).read_data

    def read_data(self, plan, planner):
        asked.extend(item.dest_index.fqn for item in plan.items)
        return inner(self, plan, planner)

    monkeypatch.setattr(type(weights.reader), "read_data", read_data)
    assert [
        key
        for key in weights.reader.read_metadata().state_dict_metadata
        if key.startswith("optimizer.")
    ]
    for name, weight in run.models[3].named_parameters():
        assert torch.equal(weights.read(name), weight)
    assert asked == [f"model.{name}" for name, _ in run.models[3].named_parameters()]
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(
        CheckpointError, match=r"norm\.weight cannot be read .* Run the same command again"
    ):
        weights.read("norm.weight")


MEASURED = """
import os, sys
from pathlib import Path
from export.convert import main
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
for name in ("small", "large"):
    before = peak()
    os.environ["RUNS_DIR"] = sys.argv[1] + "/" + name
    assert main() == 0
print(before, peak())
"""


IMPORTED = """
import json, sys
from pathlib import Path
import torch
from train.model import hf_import as foreign
from settings.config import SETTINGS, Config
from train.model.model import build
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
c = Config(**{name.lower(): value for name, value in json.loads(Path(sys.argv[1]).read_text())["settings"].items()})
model = build(c, torch.device("cpu"))
before = peak()
foreign.check(sys.argv[2], c)
foreign.load(sys.argv[2], model)
print(before, peak())
"""


def grown(code: str, *arguments: object, **settings: object) -> int:
    """By how many bytes the peak of a process of its own has grown from one point to another."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        text=True,
        check=False,
        capture_output=True,
        env=os.environ | {k: str(v) for k, v in settings.items()},
    )
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.splitlines()[-1].split())
    return after - before


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, data: dict[str, str]) -> tuple[Path, int]:
    """A folder with two runs, small and large, and the size of the large one's weights: 200 MB, no weight above 8."""
    from tests.conftest import TINY

    parent = tmp_path_factory.mktemp("memory")
    (parent / "empty.env").touch()
    tiny = Config(**{name.lower(): SETTINGS[name].parse(value) for name, value in TINY.items()})
    for name, layers, width in (("small", 1, 32), ("large", 13, 512)):
        made = make_run(
            parent / name,
            dataclasses.replace(
                tiny,
                n_layer=layers,
                n_embd=width,
                mlp_dim=4 * width,
                n_head=8,
                n_kv_head=2,
                vocab_size=4096,
                tokenizer=data["TOKENIZER"],
            ).derived(),
        )
        size = sum(weight.numel() * 4 for weight in made.models[3].parameters())
    assert size > 200e6
    return parent, size


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="Linux tells the peak of a process there"
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_memory_holds_a_weight_or_two_and_never_the_model(
    large: tuple[Path, int], dtype: str
) -> None:
    """Into one file and back; what loads with a first, small export is not counted."""
    parent, size = large
    more = grown(
        MEASURED,
        parent,
        ENV_FILE=parent / "empty.env",
        RUN_NAME="a-run",
        DEVICE="cpu",
        DATA_DIR=parent,
        DTYPE=dtype,
        OMP_NUM_THREADS=1,
    )
    assert more < 0.25 * size, f"{more / 1e6:.0f} MB more than before"
    more = grown(
        IMPORTED, parent / "large" / "a-run" / "config.json", parent / "large" / "a-run" / "export"
    )
    assert more < 0.6 * size, (
        f"{more / 1e6:.0f} MB beside the model itself"
    )  # what it imports and maps counts too
