"""Weights of transformers' models, streamed to where they are used, and the loss that they compute."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from export.weight_files import fingerprint
from finetune import weights
from finetune.adapter import Adapters
from finetune.chat import read_model
from finetune.hf_model import Tuned, on_meta
from finetune.main import count_flops, describe_model
from settings.config import Config
from tests.finetune.models import as_rank, models, opened, theirs, whole
from tests.processes import run_ranks
from tests.train.checkpoint.test_checkpoint import ALONE
from train.distributed import world as distributed
from train.model.hf_import import ForeignError
from train.model.loss import IGNORED

__all__ = ["models"]  # a fixture

KINDS = ("llama", "qwen3", "glm4_moe", "gemma2")
T = 24


def packed() -> tuple[torch.Tensor, ...]:
    """Two windows of three examples, of which half of the tokens are scored."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(6, 400, (2, T), generator=generator)
    targets = torch.where(
        torch.rand(2, T, generator=generator) < 0.5, torch.roll(tokens, -1, 1), IGNORED
    )
    positions = torch.cat([torch.arange(9), torch.arange(T - 9), torch.arange(T)]).view(2, T)
    return tokens, targets, positions, torch.tensor([0, 9, T, 2 * T, 2 * T], dtype=torch.int32)


def alone(model, tokens: torch.Tensor, targets: torch.Tensor) -> float:
    """The same loss, each example by itself, by transformers' own logits."""
    total = 0.0
    for row, part in ((0, slice(0, 9)), (0, slice(9, T)), (1, slice(0, T))):
        probability = model(tokens[row : row + 1, part]).logits[0].float().log_softmax(-1)
        for at, target in enumerate(targets[row, part].tolist()):
            total -= probability[at, target].item() if target != IGNORED else 0.0
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_loss_are_those_of_transformers(models: dict[str, Path], kind: str) -> None:
    _, model = opened(models[kind], ALONE)
    reference = theirs(models[kind])
    wanted = dict(reference.named_parameters())
    assert whole(model).keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in whole(model).items())
    buffers = dict(reference.named_buffers())
    assert [
        name for name, value in model.lm.named_buffers() if not torch.equal(value, buffers[name])
    ] == []
    tokens, targets, positions, bounds = packed()
    nats, scored = model(tokens, targets, positions, bounds)
    assert scored == (targets != IGNORED).sum() > 20
    assert nats.item() == pytest.approx(alone(reference, tokens, targets), rel=1e-5)


class Count:
    """Numbers that a forward pass keeps for backward."""

    numbers = 0

    def __call__(self, kept: torch.Tensor) -> torch.Tensor:
        self.numbers += kept.numel()
        return kept


@pytest.mark.parametrize("how", ["selective", "full"])
def test_what_backward_computes_anew_changes_no_gradient(models: dict[str, Path], how: str) -> None:
    gradients = []
    for recompute in ("none", how):
        _, model = opened(models["glm4_moe"], ALONE, ACTIVATION_CHECKPOINTING=recompute)
        count = Count()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            nats, _ = model(*packed())
        nats.backward()
        gradients.append(
            (count.numbers, {name: weight.grad for name, weight in model.named_parameters()})
        )
    (kept, plain), (less, again) = gradients
    assert less < kept
    assert all(
        torch.equal(gradient, again[name])
        for name, gradient in plain.items()
        if gradient is not None
    )


@pytest.mark.parametrize("rank", [0, 2])
def test_work_of_a_token_counts_the_experts_that_it_passes(
    models: dict[str, Path], rank: int
) -> None:
    from transformers import Qwen2MoeConfig

    d, vocabulary, wide, each, experts, taken, shared, seq_len = 32, 400, 48, 16, 6, 2, 24, 64
    config = Qwen2MoeConfig(
        vocab_size=vocabulary,
        hidden_size=d,
        intermediate_size=wide,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=each,
        num_experts=experts,
        num_experts_per_tok=taken,
        shared_expert_intermediate_size=shared,
        mlp_only_layers=[0],
        tie_word_embeddings=False,
    )
    lm = on_meta(config, torch.float32)
    c = dataclasses.replace(Config(), seq_len=seq_len, lora_rank=rank, lora_targets="o_proj")
    if adapters := Adapters.of(c):
        pytest.importorskip("peft", reason="make setup-dev installs it")
        for weight in lm.parameters():
            weight.requires_grad_(False)
        adapters.join(lm)
    attention = 2 * (
        d * d + 2 * d * 16 + d * d
    )  # two blocks; keys and values have half of the heads
    mixture = taken * 3 * d * each + d * experts + 3 * d * shared + d
    weights = attention + 3 * d * wide + mixture + vocabulary * d
    own = 2 * rank * (d + d)
    full, causal = count_flops(Tuned(lm, torch.float32), c.seq_len)
    products = (4 if rank else 6) * weights + 6 * own
    assert (full, causal) == (products + 12 * 2 * d * seq_len, products + 6 * 2 * d * seq_len)


def test_what_the_model_does_not_take_is_named(models: dict[str, Path]) -> None:
    _, model = opened(models["glm4_moe"], ALONE)
    assert model.skipped == ["model.layers.2 (2 tensors)"]
    assert opened(models["llama"], ALONE)[1].skipped == []


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("llama", lambda held: held.pop("model.norm.weight"), "its files lack model.norm.weight;"),
        (
            "glm4_moe",
            lambda held: held.pop("model.layers.1.mlp.experts.3.up_proj.weight"),
            "model.layers.1.mlp.experts.gate_up_proj",
        ),
        (
            "qwen3",
            lambda held: held.update({"model.norm.weight": torch.ones(31)}),
            r"model.norm.weight has the shape \(31,\), and config.json asks for \(32,\)",
        ),
        (
            "llama",
            lambda held: held.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
            r"have another type: model.norm.weight \(I8\)",
        ),
    ],
)
def test_files_that_are_not_of_this_model_are_refused(
    models: dict[str, Path], tmp_path: Path, kind: str, change, words: str
) -> None:
    folder = tmp_path / kind
    shutil.copytree(models[kind], folder)
    held = {}
    for path in sorted(folder.glob("*.safetensors")):
        held |= load_file(path)
        path.unlink()
    change(held)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ForeignError, match=words):
        opened(folder, ALONE)


def test_an_adapter_beside_the_weights_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    shutil.copytree(models["llama"], folder)
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "target_modules": ["q_proj"]}'
    )
    for read in (lambda: opened(folder, ALONE), lambda: read_model(folder, "float32")):
        with pytest.raises(
            ForeignError, match=r"adapter_config\.json: An adapter next to the weights"
        ):
            read()


def test_a_chat_reads_no_weights_without_their_scales(
    models: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "llama"
    shutil.copytree(models["llama"], folder)
    path = next(folder.glob("*.safetensors"))
    held = {name: weight.to(torch.float8_e4m3fn) for name, weight in load_file(path).items()}
    save_file(held, path, metadata={"format": "pt"})
    with pytest.raises(ForeignError, match=r"have another type: .*weight \(F8_E4M3\)"):
        read_model(folder, "auto")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"model_type": "no_such_model"}, "transformers cannot use it"),
        ({"model_type": "vit"}, "model_type=vit is not a language model"),
        ({"quantization_config": {"quant_method": "fp8"}}, "the weights are quantized"),
    ],
)
def test_a_model_of_another_kind_is_refused(
    models: dict[str, Path], tmp_path: Path, facts: dict, words: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models["llama"], folder)
    config = json.loads((folder / "config.json").read_text()) | facts
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ForeignError, match=words):
        opened(folder, ALONE)


def test_weights_of_one_shape_are_told_apart(models: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(models["llama"], folder)
    assert fingerprint(folder) == fingerprint(models["llama"])
    path = sorted(folder.glob("*.safetensors"))[1]
    held = load_file(path)
    save_file(
        {name: values + 0.01 for name, values in held.items()}, path, metadata={"format": "pt"}
    )
    assert fingerprint(folder) != fingerprint(models["llama"])


# ---- Several processes


def load_as_rank(rank: int, size: int, folder: str, found: str, settings: dict[str, str]) -> None:
    world = as_rank(rank, size)
    read = 0

    class Counting:
        """A slice of a file that counts the bytes that are asked of it."""

        def __init__(self, inside):
            self.inside = inside

        def get_shape(self):
            return self.inside.get_shape()

        def __getitem__(self, part):
            nonlocal read
            values = self.inside[part]
            read += values.nbytes
            return values

    class Files:
        def __init__(self, path, framework):
            self.file = safe_open(path, framework=framework)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            return Counting(self.file.get_slice(name))

    weights.safe_open = Files
    _, model = opened(Path(folder), world, **settings)
    held = sum(weight.to_local().nbytes for weight in model.parameters())
    reference = theirs(Path(folder))
    wanted = dict(reference.named_parameters())
    same = all(torch.equal(weight, wanted[name]) for name, weight in whole(model).items())
    nats, scored = model(*packed())
    (nats / scored).backward()
    total = {name: weight.grad.full_tensor() * size for name, weight in model.named_parameters()}
    tokens, targets, *_ = packed()
    Path(f"{found}/{rank}.json").write_text(
        json.dumps(
            {
                "held": held,
                "read": read,
                "same": same,
                "nats": nats.item(),
                "wanted": alone(reference, tokens, targets),
                "finite": all(bool(torch.isfinite(gradient).all()) for gradient in total.values()),
                "of_weights": sum(weight.nbytes for weight in wanted.values()),
            }
        )
    )
    distributed.broadcast_object(None)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size", "settings"),
    [
        ("glm4_moe", 2, {"PARALLEL": "fsdp"}),
        ("glm4_moe", 4, {"PARALLEL": "fsdp"}),
        ("qwen3", 2, {"PARALLEL": "fsdp"}),
        ("llama", 4, {"PARALLEL": "hsdp", "SHARD_RANKS": "2"}),
    ],
)
def test_each_process_reads_and_holds_its_part_only(
    models: dict[str, Path],
    tmp_path: Path,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    size: int,
    settings: dict[str, str],
) -> None:
    monkeypatch.setenv("TEST_PORT", str(free_port))
    run_ranks(load_as_rank, (size, str(models[kind]), str(tmp_path), settings), size)
    parts = int(settings.get("SHARD_RANKS", size))
    for rank in range(size):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["same"] and found["finite"]
        assert found["nats"] == pytest.approx(found["wanted"], rel=1e-5)
        # rows that do not divide are padded; what is not split, of buffers, is read whole
        assert found["held"] <= 1.02 * found["of_weights"] / parts
        assert found["read"] <= 1.02 * found["of_weights"] / parts


@pytest.mark.parametrize(
    ("kind", "settings", "split", "said"),
    [
        ("glm4_moe", {"DTYPE": "bfloat16"}, False, True),
        ("glm4_moe", {"DTYPE": "bfloat16"}, True, False),
        ("glm4_moe", {"DTYPE": "float32"}, False, False),
        ("llama", {"DTYPE": "bfloat16"}, False, False),
        ("glm4_moe", {"DTYPE": "bfloat16", "LORA_RANK": "2"}, False, False),
    ],
    ids=str,
)
def test_experts_that_autocast_does_not_know_are_named(
    models: dict[str, Path],
    kind: str,
    settings: dict[str, str],
    split: bool,
    said: bool,
) -> None:
    if "LORA_RANK" in settings:
        pytest.importorskip("peft", reason="make setup-dev installs it")
    c, model = opened(models[kind], ALONE, PRESET="finetune", **settings)
    text = "\n".join(describe_model(model, c, split))
    assert ("The experts are computed in float32" in text) == said
