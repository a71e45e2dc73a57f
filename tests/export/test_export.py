"""make export: what transformers loads computes what the checkpoint does, to the bit of its weights."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

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
    {"tie_embeddings": False},
    {"n_kv_head": 1, "vocab_size": 600},
    QWEN,
    {**QWEN, "tie_embeddings": True, "vocab_size": 513},
    {"rope_theta": 123456.7, "norm_eps": 3e-7},
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
    c = recipe(tiny, tokenizer=data["TOKENIZER"], **shape)
    made = make_run(tmp_path, c, norm_eps=changes.get("norm_eps"))
    c, model = made.config, made.models[3]
    assert made.command(monkeypatch) == 0
    theirs, words = model_of(made.export), tokenizer_of(made.export)
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if c.qk_norm else "LlamaForCausalLM")
    assert logits(theirs, c).std() > 0.1
    torch.testing.assert_close(logits(theirs, c), logits(model, c), rtol=1e-5, atol=1e-5)
    assert {w.dtype for w in theirs.parameters()} == {torch.float32}
    vocabulary = tokenizer.load(Path(c.tokenizer))
    prompt = "abcd def"
    ids = words(words.bos_token + prompt, return_tensors="pt").input_ids
    assert ids[0].tolist() == [vocabulary.end_of_text, *vocabulary.encode(prompt)]
    text = continue_text(model, vocabulary, prompt, 12, seed=1, temperature=0)
    found = theirs.generate(ids, max_new_tokens=12, do_sample=False)[0]
    assert words.decode(found, skip_special_tokens=True) == text and len(text) > len(prompt)


def test_a_head_that_is_tied_is_in_no_file_and_padding_neither(
    tiny: Config, tmp_path: Path, data: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_run(tmp_path, recipe(tiny, tokenizer=data["TOKENIZER"], **LLAMA, vocab_size=513))
    assert made.command(monkeypatch) == 0
    found = load_file(made.export / "model.safetensors")
    model = made.models[3]
    assert model.embed_tokens.weight.shape == (640, 64)
    assert found.keys() == {f"model.{name}" for name, _ in model.named_parameters()}
    assert all(
        torch.equal(w[:513] if "embed" in name else w, found[f"model.{name}"])
        for name, w in model.named_parameters()
    )


def test_bfloat16_is_each_weight_rounded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.command(monkeypatch, DTYPE="bfloat16") == 0
    found = load_file(run.export / "model.safetensors")
    assert {w.dtype for w in found.values()} == {torch.bfloat16}
    assert all(
        torch.equal(w.to(torch.bfloat16), found[hf_import.their_name(name)])
        for name, w in run.models[3].named_parameters()
    )
    assert next(model_of(run.export).parameters()).dtype == torch.bfloat16  # by config.json
    hf_import.check(run.export, run.config)


def test_shards_have_an_index_and_hold_the_same(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "FILE_GB", 0.0001)  # 100 kB
    assert run.command(monkeypatch) == 0
    index = json.loads((run.export / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in run.export.glob("*.safetensors"))
    assert len(files) > 3 and set(index["weight_map"].values()) == set(files)
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    whole = {}
    for name in files:
        part = load_file(run.export / name)
        size = sum(w.numel() * 4 for w in part.values())
        assert size <= 100_000 or len(part) == 1
        assert all(index["weight_map"][key] == name for key in part)
        whole |= part
    assert index["metadata"] == {
        "total_size": 4 * sum(w.numel() for w in whole.values()),
        "total_parameters": sum(w.numel() for w in whole.values()),
    }
    assert all(
        torch.equal(w, whole[hf_import.their_name(name)])
        for name, w in run.models[3].named_parameters()
    )
    torch.testing.assert_close(
        logits(model_of(run.export), run.config),
        logits(run.models[3], run.config),
        rtol=1e-5,
        atol=1e-5,
    )


# ---- There and back again


@pytest.mark.parametrize("file_gb", [5, 0.0001], ids=["one file", "shards"])
@pytest.mark.parametrize("changes", [{**LLAMA, "vocab_size": 513}, QWEN], ids=["Llama", "Qwen3"])
def test_an_export_is_a_start_of_training_with_the_same_bits(
    tiny: Config,
    tmp_path: Path,
    data: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict,
    file_gb: float,
) -> None:
    monkeypatch.setattr(weight_files, "FILE_GB", file_gb)
    made = make_run(tmp_path, recipe(tiny, tokenizer=data["TOKENIZER"], **changes))
    assert made.command(monkeypatch) == 0
    hf_import.check(made.export, made.config)
    other = build(dataclasses.replace(made.config, seed=99), CPU)
    hf_import.load(made.export, other)
    ours = dict(made.models[3].named_parameters())
    rows = {
        name: made.config.vocab_size if "embed" in name or "head" in name else None for name in ours
    }
    assert all(
        torch.equal(w[: rows[name]], ours[name][: rows[name]])
        for name, w in other.named_parameters()
    )


def test_a_conversation_through_the_template_has_the_ids_of_ours(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.command(monkeypatch) == 0
    words, vocabulary = tokenizer_of(run.export), tokenizer.load(run.export / "tokenizer.json")
    said = [
        ("system", "Be brief."),
        ("user", " abc\n def?"),
        ("assistant", "hgf"),
        ("user", "\u65e5 \u00e9"),
    ]
    found = words.apply_chat_template(
        [{"role": role, "content": text} for role, text in said],
        return_dict=False,
        add_generation_prompt=True,
    )
    special = vocabulary.tokenizer.token_to_id
    ids = [vocabulary.end_of_text]
    for role, text in said:
        ids += [special(f"<|{role}|>"), *vocabulary.encode(text), special("<|end|>")]
    assert found == [*ids, special("<|assistant|>")]
    ends = json.loads((run.export / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [vocabulary.end_of_text, special("<|end|>")]
    assert "chat template" in (run.export / "README.md").read_text()


def test_its_tokenizer_is_the_run_s_to_the_byte(
    run: Run, data: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that shards which were made with it are found again."""
    assert run.command(monkeypatch) == 0
    assert (
        tokenizer.load(run.export / "tokenizer.json").sha256
        == tokenizer.load(Path(data["TOKENIZER"])).sha256
    )


# ---- Which checkpoint, and what is replaced


def test_the_newest_is_taken_and_that_of_step_where_it_is_given(
    tiny: Config,
    tmp_path: Path,
    data: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = make_run(tmp_path, recipe(tiny, tokenizer=data["TOKENIZER"]), steps=(3, 5))

    def weights() -> torch.Tensor:
        return load_file(made.export / "model.safetensors")["model.norm.weight"]

    assert made.command(monkeypatch) == 0
    said = capsys.readouterr().out
    assert (
        "step 5" in said
        and "replaces" not in said
        and torch.equal(weights(), made.models[5].norm.weight)
    )
    assert made.command(monkeypatch, STEP="3") == 0
    said = capsys.readouterr().out
    assert "this replaces an export" in said and torch.equal(weights(), made.models[3].norm.weight)
    assert sorted(path.name for path in made.folder.iterdir()) == [
        ".export",
        "checkpoints",
        "config.json",
        "empty.env",
        "export",
    ]
    assert made.command(monkeypatch, STEP="4") == 64
    assert (
        "STEP=4: Run a-run has no checkpoint of that step. There are: 5, 3"
        in capsys.readouterr().err
    )
    (made.folder / "checkpoints" / "step_0000005" / "__0_0.distcp").write_bytes(b"damaged")
    assert (
        made.command(monkeypatch, STEP="5") == 78
        and "__0_0.distcp is damaged" in capsys.readouterr().err
    )
    assert made.command(monkeypatch) == 0  # the newest that is whole
    assert torch.equal(weights(), made.models[3].norm.weight)


def test_an_export_that_somebody_changed_is_not_replaced(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.command(monkeypatch) == 0
    (run.export / "LICENSE").write_text("mine")
    with open(run.export / "README.md", "a") as file:
        file.write("my own words\n")
    before = digest(run.export)
    assert run.command(monkeypatch) == 78
    assert "holds LICENSE, README.md, which no export wrote" in capsys.readouterr().err
    assert digest(run.export) == before


@pytest.mark.parametrize(
    "point", ["shards.write", "place.seal", "before the rename", "between the renames"]
)
def test_a_killed_export_leaves_what_was_there_and_the_next_one_clears_up(
    run: Run, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    assert run.command(monkeypatch) == 0
    before = digest(run.export)

    class Killed(BaseException):
        """Which nothing cleans up after, as kill -9."""

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(place.shutil, "rmtree", lambda *_, **__: None)
        if point == "shards.write":
            patch.setattr(weight_files.os, "fsync", die)
        elif point == "place.seal":
            patch.setattr(place, "flush_folder", die)
        elif point == "before the rename":
            patch.setattr(place, "replace", die)
        else:
            rename = os.rename
            patch.setattr(
                place.os, "rename", lambda a, b: die() if b == run.export else rename(a, b)
            )
        with pytest.raises(Killed):
            run.command(patch, DTYPE="bfloat16")
    halves = [path for path in run.folder.glob(".*") if path.is_dir()]
    assert halves and run.export.exists() == (point != "between the renames")
    assert not run.export.exists() or digest(run.export) == before
    with place.alone(run.folder):
        assert digest(run.export) == before and not [
            path for path in run.folder.glob(".*") if path.is_dir()
        ]
    assert run.command(monkeypatch, DTYPE="bfloat16") == 0
    assert digest(run.export) != before


def test_two_exports_of_a_run_do_not_meet(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with place.alone(run.folder):
        assert run.command(monkeypatch) == 78
    assert "another process exports this run" in capsys.readouterr().err and not run.export.exists()


# ---- What is checked


def test_a_bit_that_turns_on_its_way_to_the_disk_is_noticed(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = command.write_beside

    def turned(folder: Path, *rest: object) -> None:
        content = bytearray((folder / "model.safetensors").read_bytes())
        content[-5] ^= 4  # in the last weight, the head
        (folder / "model.safetensors").write_bytes(content)
        written(folder, *rest)

    monkeypatch.setattr(command, "write_beside", turned)
    assert run.command(monkeypatch) == 78
    assert "read back, lm_head.weight are not what was written" in capsys.readouterr().err
    assert not run.export.exists() and not list(run.folder.glob(".export-*"))


def test_weights_that_are_no_numbers_are_refused(
    tiny: Config,
    tmp_path: Path,
    data: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def spoilt(c: Config, *_: object, **__: object) -> torch.nn.Module:
        model = build(c, CPU)
        model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
        return model

    with monkeypatch.context() as patch:
        patch.setattr("tests.export.exported.build", spoilt)
        made = make_run(tmp_path, recipe(tiny, tokenizer=data["TOKENIZER"]))
    assert made.command(monkeypatch) == 78
    said = capsys.readouterr().err
    assert (
        "model.layers.1.mlp.up_proj.weight holds values" in said
        and "STEP" in said
        and not made.export.exists()
    )


def test_sums_are_those_of_sha256sum(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.command(monkeypatch) == 0
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(check, cwd=run.export, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    names = {line.removesuffix(": OK") for line in done.stdout.splitlines()}
    assert names == {path.name for path in run.export.iterdir()} - {"SHA256SUMS"}
    (run.export / "tokenizer.json").write_text("{}")
    assert subprocess.run(check, cwd=run.export, capture_output=True, check=False).returncode == 1


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
        CheckpointError, match=r"norm\.weight cannot be read .* call again for its newest"
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
