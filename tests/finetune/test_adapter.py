"""LoRA's adapters: where they are put, what they begin with, and what is trained."""

import json
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft", reason="make setup-dev installs it")

from finetune.adapter import Adapters, adapters_of, in_file, is_adapter
from finetune.hf_model import configuration, on_meta
from settings import SettingsError
from settings.config import Config
from tests.finetune.models import as_rank, models, opened, theirs, whole
from tests.finetune.test_hf_model import packed
from tests.processes import run_ranks
from tests.train.checkpoint.test_checkpoint import ALONE
from train.distributed import world as distributed
from train.distributed.parallel import parallelize

__all__ = ["models"]  # a fixture

ALL = "attention,mlp,experts"


def chosen(folder: Path, targets: str) -> tuple[list[str], list[str]]:
    lm = on_meta(configuration(folder), torch.float32)
    return Adapters(4, 8.0, 0.0, tuple(targets.split(","))).chosen(lm)


def test_default_targets_are_attention_and_what_all_tokens_pass(models: dict[str, Path]) -> None:
    attention = [f"self_attn.{name}_proj" for name in "koqv"]
    mlp = [f"mlp.{name}_proj" for name in ("down", "gate", "up")]
    shared = [f"mlp.shared_experts.{name}_proj" for name in ("down", "gate", "up")]
    assert chosen(models["llama"], Config().lora_targets) == (sorted([*attention, *mlp]), [])
    assert chosen(models["glm4_moe"], Config().lora_targets) == (
        sorted([*attention, *mlp, *shared]),
        [],
    )
    assert chosen(models["glm4_moe"], "experts") == (
        [],
        ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"],
    )
    assert chosen(models["glm4_moe"], "o_proj") == (["self_attn.o_proj"], [])
    assert chosen(models["glm4_moe"], "gate_up_proj,q_proj") == (
        ["self_attn.q_proj"],
        ["mlp.experts.gate_up_proj"],
    )


@pytest.mark.parametrize(
    ("kind", "targets", "words"),
    [
        ("llama", "experts", r"the model has no experts; there are attention, mlp, down_proj"),
        ("glm4_moe", "q_proj,query", r"the model has no query;.* q_proj"),
    ],
)
def test_a_target_that_is_nowhere_is_refused(
    models: dict[str, Path], kind: str, targets: str, words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        chosen(models[kind], targets)


def test_dropout_where_peft_has_none_is_refused(models: dict[str, Path]) -> None:
    assert any(
        module.p == 0.1
        for module in opened(models["llama"], ALONE, LORA_RANK=4, LORA_DROPOUT=0.1)[1].modules()
        if isinstance(module, torch.nn.Dropout)
    )
    with pytest.raises(SettingsError, match=r"LORA_DROPOUT=0.1: peft has none for mlp"):
        opened(models["glm4_moe"], ALONE, LORA_RANK=4, LORA_DROPOUT=0.1)


@pytest.mark.parametrize("how", ["selective", "full"])
def test_dropout_leaves_out_the_same_where_backward_computes_anew(
    models: dict[str, Path], how: str
) -> None:
    gradients = []
    for recompute in ("none", how):
        _, model = opened(
            models["llama"],
            ALONE,
            LORA_RANK=4,
            LORA_DROPOUT=0.5,
            ACTIVATION_CHECKPOINTING=recompute,
        )
        torch.manual_seed(1)
        with torch.no_grad():
            for name, weight in adapters_of(model).items():
                if ".lora_B." in name:
                    weight.normal_(0, 0.1)
        model(*packed())[0].backward()
        gradients.append({name: weight.grad for name, weight in adapters_of(model).items()})
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


@pytest.mark.parametrize(
    ("kind", "targets"), [("llama", "attention,mlp"), ("glm4_moe", ALL), ("glm4_moe", "up_proj")]
)
def test_a_model_with_new_adapters_computes_what_it_did_and_trains_them_alone(
    models: dict[str, Path], kind: str, targets: str
) -> None:
    _, bare = opened(models[kind], ALONE)
    _, model = opened(models[kind], ALONE, LORA_RANK=4, LORA_TARGETS=targets)
    assert model(*packed())[0].item() == pytest.approx(bare(*packed())[0].item(), rel=1e-6)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == set(adapters_of(model)) and trained
    before = whole(model)
    optimizer = torch.optim.SGD(
        [weight for weight in model.parameters() if weight.requires_grad], lr=0.1
    )
    for _ in range(2):  # A has a gradient once B is not zero
        (model(*packed())[0] / 20).backward()
        optimizer.step()
    after = whole(model)
    assert (
        {name for name in after if not torch.equal(before[name], after[name])}
        == {name.removeprefix("lm.") for name in trained}
        != set()
    )


@pytest.mark.parametrize(
    ("kind", "targets"), [("llama", "attention,mlp"), ("glm4_moe", ALL), ("glm4_moe", "up_proj")]
)
def test_peft_reads_what_is_trained_from_its_own_format(
    models: dict[str, Path], tmp_path: Path, kind: str, targets: str
) -> None:
    from peft import PeftModel
    from safetensors.torch import save_file

    _, model = opened(models[kind], ALONE, LORA_RANK=4, LORA_TARGETS=targets)
    with torch.no_grad():
        for name, weight in adapters_of(model).items():
            if ".lora_B." in name:
                weight.normal_(0, 0.05)
    adapters = Adapters(4, 8.0, 0.0, tuple(targets.split(",")))
    adapters.config(
        on_meta(configuration(models[kind]), torch.float32), str(models[kind])
    ).save_pretrained(tmp_path)
    save_file(
        {in_file(name): weight.detach() for name, weight in adapters_of(model).items()},
        tmp_path / "adapter_model.safetensors",
    )
    row = packed()[0][:1, :12]
    scored = torch.roll(row, -1, 1)
    mine = model(row, scored, torch.arange(12)[None], torch.tensor([0, 12], dtype=torch.int32))[
        0
    ].item()
    reader = PeftModel.from_pretrained(theirs(models[kind]), str(tmp_path)).eval()
    logits = reader(row).logits.log_softmax(-1)
    assert mine == pytest.approx(-logits.gather(2, scored[..., None]).sum().item(), rel=1e-5)
    plain = theirs(models[kind])(row).logits.log_softmax(-1)
    assert mine != pytest.approx(-plain.gather(2, scored[..., None]).sum().item(), rel=1e-4)


def test_what_is_frozen_has_the_type_of_the_computation_and_what_is_trained_is_float32(
    models: dict[str, Path],
) -> None:
    _, model = opened(models["glm4_moe"], ALONE, LORA_RANK=4, LORA_TARGETS=ALL, DTYPE="bfloat16")
    for name, weight in model.named_parameters():
        assert weight.dtype == (torch.float32 if is_adapter(name) else torch.bfloat16), name
    _, exact = opened(models["glm4_moe"], ALONE)
    nats, _ = model(*packed())
    nats.backward()
    assert nats.item() == pytest.approx(exact(*packed())[0].item(), rel=0.02)
    assert {
        weight.dtype for weight in opened(models["llama"], ALONE, DTYPE="bfloat16")[1].parameters()
    } == {torch.float32}


# ---- Several processes


def train_as_rank(rank: int, size: int, folder: str, found: str, settings: dict[str, str]) -> None:
    world = as_rank(rank, size)
    c, bare = opened(Path(folder), world, LORA_RANK="4", **settings)
    model = parallelize(bare, c, world)
    optimizer = torch.optim.AdamW(
        [weight for weight in model.parameters() if weight.requires_grad], lr=3e-3
    )
    losses = []
    for _ in range(5):
        nats, scored = model(*packed())  # the same on all: the average is that of one
        (nats / scored).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(nats.item())
    weights = {name: weight.tolist() for name, weight in whole(bare).items() if is_adapter(name)}
    Path(f"{found}/{rank}.json").write_text(json.dumps({"losses": losses, "weights": weights}))
    if size > 1:
        distributed.broadcast_object(None)
        os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("glm4_moe", {"LORA_TARGETS": ALL, "PARALLEL": "fsdp"}), ("qwen3", {"PARALLEL": "ddp"})],
)
def test_adapters_of_one_two_and_four_processes_agree(
    models: dict[str, Path],
    tmp_path: Path,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    settings: dict[str, str],
) -> None:
    monkeypatch.setenv("TEST_PORT", str(free_port))
    results = []
    for size in (1, 2, 4):
        place = tmp_path / str(size)
        place.mkdir()
        run_ranks(train_as_rank, (size, str(models[kind]), str(place), settings), size)
        results += [json.loads((place / f"{rank}.json").read_text()) for rank in range(size)]
    first = results[0]
    assert first["losses"][-1] < first["losses"][0] - 1
    for other in results[1:]:
        assert other["losses"] == pytest.approx(first["losses"], rel=1e-5)
        assert other["weights"].keys() == first["weights"].keys()
        for name, values in first["weights"].items():
            assert torch.allclose(
                torch.tensor(other["weights"][name]), torch.tensor(values), atol=2e-5
            ), name
