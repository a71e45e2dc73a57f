"""A model of transformers' as the trainer takes it: forward(tokens, targets, positions, bounds) -> (sum, count).

    config.json -> its class, on the meta device -> adapters -> split over processes -> weights, in place

The class is transformers' own. Round it is what training here needs: the loss inside forward, computed in chunks (no
full logits) where the head of its kind is known to be a plain product, and packed examples kept apart. Weights that are
trained are float32, as in pretraining; frozen ones, of a model with adapters, are of the type that it computes in.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finetune import weights
from settings import SettingsError
from settings.config import Config
from train.model.attention import document_mask
from train.model.hf_import import ForeignError, read_json, tensors, weight_files
from train.model.loss import IGNORED, summed_loss
from train.model.recompute import recomputed

# Kinds (model_type) whose logits are the product of hidden states and head, and nothing more.
PLAIN_HEAD = {
    "glm4",
    "glm4_moe",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
}
SAMPLED = 2**20  # bytes of a file by which it is known again


class Tuned(nn.Module):
    """A model of transformers' in a shell. names of weights are its own behind "lm."; skipped: what its files hold that
    it does not take."""

    def __init__(self, lm: Any, dtype: torch.dtype, recompute: str = "none"):
        super().__init__()
        self.lm, self.dtype, self.skipped = lm, dtype, list[str]()
        self.compiled = False
        self.plain_head = lm.config.model_type in PLAIN_HEAD
        if recompute != "none":
            for layer in self.layers:
                recompute_in_backward(layer, recompute)

    @property
    def decoder(self) -> Any:
        """The model without its head."""
        return self.lm.get_decoder()

    @property
    def layers(self) -> Any:
        """The blocks, in order: what FSDP2 gathers at once."""
        return self.decoder.layers

    def forward(
        self, tokens: Tensor, targets: Tensor, positions: Tensor, bounds: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(sum of the losses in nats, scored tokens). tokens, targets (IGNORED where not scored) and positions (B, T)
        int64, bounds of examples as attention.document_mask has them."""
        with self.in_its_type(tokens.device):
            told = {
                "attention_mask": self.mask(bounds, *tokens.shape),
                "position_ids": positions,
                "use_cache": False,
            }
            if self.plain_head:
                hidden = self.decoder(tokens, **told)[0].flatten(0, 1)
                return summed_loss(
                    hidden.to(self.dtype), self.lm.get_output_embeddings().weight, targets.flatten()
                )
            logits = self.lm(tokens, **told).logits.float().flatten(0, 1)
        nats = nn.functional.cross_entropy(
            logits, targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return nats, (targets != IGNORED).sum()

    def mask(self, bounds: Tensor, B: int, T: int) -> Tensor:
        """(B, 1, T, T): for torch's attention whether a query may look at a key, for others what is added."""
        allowed = document_mask(bounds, B, T)
        if self.lm.config._attn_implementation == "sdpa":
            return allowed
        return torch.where(allowed, 0.0, torch.finfo(self.dtype).min).to(self.dtype)

    def in_its_type(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """FSDP2 has weights in that type; where there is none, torch's autocast makes them so."""
        if self.dtype == torch.float32 or hasattr(self, "reshard"):
            return contextlib.nullcontext()
        return torch.autocast(device.type, self.dtype)


def recompute_in_backward(layer: Any, how: str) -> None:
    """Have a block keep what `how` says, when it is trained."""
    inside = layer.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inside(x, *args, **kwargs)
        return recomputed(lambda hidden: inside(hidden, *args, **kwargs), how, x, draws=True)

    layer.forward = forward


def configuration(folder: Path) -> Any:
    """transformers' configuration of a model's folder; runs no code of the model's. Raises ForeignError, also where
    the model is not one that can be fine-tuned here."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    facts = read_json(folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of many types
        raise ForeignError(
            f"{folder / 'config.json'}: transformers cannot use it ({' '.join(str(error).split())[:200]}"
            "); take a model of a kind that it has"
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ForeignError(
            f"{folder / 'config.json'}: model_type={facts.get('model_type')} is not a language model "
            "that writes text from the left to the right; take one that is"
        )
    if "quantization_config" in facts:
        raise ForeignError(
            f"{folder / 'config.json'}: the weights are quantized; take the same model in bfloat16"
        )
    return config


def build(
    folder: Path, c: Config, device: torch.device, sharding: Any = None, adapters: Any = None
) -> Tuned:
    """The model of a folder on the device, whole or split over processes, with its weights.

    sharding: parallel.Sharding, or None. adapters: finetune/adapter.py's Adapters, or None, where all is trained.
    Raises ForeignError, SettingsError.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = configuration(folder)
    refuse_attention(config, c)
    stored = torch.float32 if adapters is None else getattr(torch, c.dtype)
    skeleton, lm = on_meta(config, stored), on_meta(config, stored)
    if adapters:
        adapters.join(lm)
    model = Tuned(lm, getattr(torch, c.dtype), c.activation_checkpointing)
    if not hasattr(model.decoder, "layers"):
        raise SettingsError(
            [
                f"MODEL={c.model}: {type(lm).__name__} has no list of blocks by the name layers; take a "
                "model of another kind"
            ]
        )
    if sharding:
        sharding.split(model)
    model.skipped = weights.load(folder, model.lm, skeleton, stored, device)
    if adapters:
        adapters.fill(model, c, device)
    return model.train()


def on_meta(config: Any, dtype: torch.dtype) -> Any:
    """A model of transformers' that takes no memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def refuse_attention(config: Any, c: Config) -> None:
    """Raises SettingsError where packed examples would not be kept apart, or what a window holds not be all attended
    to, as this model would."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if strange := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise SettingsError(
            [
                f"MODEL={c.model}: its blocks of kind {', '.join(strange)} would carry one packed example "
                "into the next; take a model whose blocks all attend"
            ]
        )
    width = getattr(text, "sliding_window", None)
    if (
        width
        and width < c.seq_len
        and ("sliding_attention" in kinds or not hasattr(text, "layer_types"))
    ):
        raise SettingsError(
            [
                f"SEQ_LEN={c.seq_len}: MODEL={c.model} attends to the last {width} tokens only, which is "
                f"not done here; set SEQ_LEN={width} or less"
            ]
        )


def shape(folder: Path) -> Mapping[str, Any]:
    """Settings of pretraining -> what they are in a model's config.json, for record and screen; those that it has not
    are left out."""
    config = configuration(folder).get_text_config()
    names = {
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_kv_head": "num_key_value_heads",
        "n_embd": "hidden_size",
        "vocab_size": "vocab_size",
        "mlp_dim": "intermediate_size",
    }
    found = {ours: getattr(config, theirs, None) for ours, theirs in names.items()}
    return {ours: value for ours, value in found.items() if isinstance(value, int) and value > 0}


def longest(folder: Path) -> int | None:
    """Tokens that the model was made for, where its config.json says so."""
    value = getattr(configuration(folder).get_text_config(), "max_position_embeddings", None)
    return value if isinstance(value, int) and value > 0 else None


def fingerprint(folder: Path) -> str:
    """Of config.json, of what the files hold by name, type and shape, and of SAMPLED bytes in the middle of each: base
    and tuned weights of one shape differ there. Not all is read, which of hundreds of GB would take minutes."""
    facts: list[Any] = [
        read_json(folder / "config.json"),
        sorted((name, one.dtype, one.shape) for name, one in tensors(folder).items()),
    ]
    for path in weight_files(folder):
        size = path.stat().st_size
        with open(path, "rb") as file:
            file.seek(max(0, size - SAMPLED) // 2)
            facts.append((path.name, size, hashlib.sha256(file.read(SAMPLED)).hexdigest()))
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
