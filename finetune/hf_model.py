"""A model of transformers' as the trainer takes it: forward(tokens, targets, positions, bounds) -> (sum, count).

    config.json -> its class, on the meta device -> adapters -> split over processes -> weights, in place

The class is transformers' own. Around it is what training needs: the loss inside forward, computed in chunks without
full logits if these are a product (head.py), and packed examples kept apart (packed_attention.py). Trained weights are
float32, as in pretraining; the frozen ones of a model with adapters have DTYPE.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finetune import packed_attention, weights
from finetune.head import find_head
from settings import SettingsError
from settings.config import Config
from train.distributed.parallel import weights_of
from train.model.attention import document_mask
from train.model.hf_import import ForeignError, read_json
from train.model.loss import IGNORED
from train.model.recompute import recomputed

BY_MASK = {"nemotron"}  # its blocks do not hand the bounds of examples to attention
PROBE_TOKENS = 4
# Of the loss. The difference is 0 in all classes of transformers that can be packed, in bfloat16 too.
PROBE_TOLERANCE = 1e-3


class Tuned(nn.Module):
    """A model of transformers' with its loss.

    Attributes:
        lm: the model. Names of weights are its own after "lm.".
        dtype: of activations and matrix products.
        head: what the logits are, None where that is known to the model alone.
        skipped: what the files hold that the model does not take.
    """

    def __init__(self, lm: Any, dtype: torch.dtype, recompute: str = "none"):
        super().__init__()
        self.lm = lm
        self.dtype = dtype
        self.skipped: list[str] = []
        self.compiled = False
        self.head = find_head(lm)
        self.packs = lm._supports_attention_backend and lm.config.model_type not in BY_MASK
        if self.packs:
            packed_attention.register()
            lm.set_attn_implementation(packed_attention.NAME)
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
        """Compute the loss.

        Args:
            tokens, targets, positions: (B, T) int64; targets are IGNORED where not scored.
            bounds: (K + 1,) int32, of examples, as attention.document_mask has them.

        Returns:
            The sum of the losses in nats, and the number of scored tokens.
        """
        inputs = {"position_ids": positions, "use_cache": False}
        if self.packs:
            inputs["bounds"] = bounds
        else:
            inputs["attention_mask"] = self.mask(bounds, *tokens.shape)
        scored: Any = (slice(None), slice(None))
        if tokens.device.type == "cpu":  # a GPU would have to tell the host how many there are
            scored = (targets != IGNORED).nonzero(as_tuple=True)
        labels = targets[scored].flatten()
        with self.autocast(tokens.device):
            if self.head is None:
                logits = self.lm(tokens, **inputs).logits[scored].float()
                nats = nn.functional.cross_entropy(
                    logits.flatten(0, -2), labels, ignore_index=IGNORED, reduction="sum"
                )
                return nats, (labels != IGNORED).sum()
            hidden = self.decoder(tokens, **inputs)[0][scored].to(self.dtype)
            weight = self.lm.get_output_embeddings().weight
            return self.head.summed_loss(hidden.flatten(0, -2), weight, labels)

    def mask(self, bounds: Tensor, B: int, T: int) -> Tensor:
        """Return (B, 1, T, T): for torch's attention whether a query may look at a key, for others what is added."""
        allowed = document_mask(bounds, B, T)
        if self.lm.config._attn_implementation == "sdpa":
            return allowed
        return torch.where(allowed, 0.0, torch.finfo(self.dtype).min).to(self.dtype)

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return torch's autocast to the dtype, unless FSDP2 gathers weights in it."""
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
    dtype = getattr(torch, c.dtype)
    stored = torch.float32 if adapters is None else dtype
    skeleton, lm = on_meta(config, stored), on_meta(config, stored)
    refuse_attention(lm, c)
    if not hasattr(lm.get_decoder(), "layers"):
        raise SettingsError(
            [
                f"MODEL={c.model}: {type(lm).__name__} has no list of blocks by the name layers. "
                "Choose a model of another kind."
            ]
        )
    if adapters:
        adapters.join(lm)
    model = Tuned(lm, dtype, c.activation_checkpointing)
    if sharding:
        sharding.split(model)
    model.skipped = weights.load(folder, model.lm, skeleton, stored, device)
    if adapters:
        adapters.fill(model, c, device)
    refuse_mixing(model, c.model, device)
    return model.train()


def on_meta(config: Any, dtype: torch.dtype) -> Any:
    """A model of transformers' that takes no memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def refuse_attention(lm: Any, config: Config) -> None:
    """Raise SettingsError where packed examples would not be kept apart."""
    kinds = getattr(lm.config.get_text_config(), "layer_types", None) or []
    carries = lm._is_stateful or set(kinds) - {"full_attention", "sliding_attention"}
    looks_ahead = any(getattr(module, "is_causal", True) is False for module in lm.modules())
    if carries or looks_ahead:
        problem = "blocks that carry state from one packed example into the next"
        if looks_ahead:
            problem = "attention to later tokens"
        raise SettingsError(
            [
                f"MODEL={config.model}: {type(lm).__name__} has {problem}. Choose a model in which "
                "every block has causal attention, such as Llama, Qwen3 or Gemma 3."
            ]
        )


@torch.no_grad()
def refuse_mixing(model: Tuned, name: str, device: torch.device) -> None:
    """Raise SettingsError if an example has another loss where one is packed before it.

    A window holds the same example twice. A class that ignores positions, or lets the second look at
    the first, gives them different losses.

    Args:
        name: of MODEL.
    """
    n = PROBE_TOKENS
    vocab_size = model.lm.get_input_embeddings().num_embeddings
    example = torch.arange(1, n + 1, device=device) * (vocab_size // (n + 2))
    positions = torch.arange(n, device=device).repeat(1, 2)
    bounds = torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device)
    nats = []
    model.eval()
    for begin in (0, n):
        targets = torch.full_like(positions, IGNORED)
        targets[0, begin : begin + n - 1] = example[1:]
        nats.append(model(example.repeat(1, 2), targets, positions, bounds)[0].item())
    weights_of(model)  # FSDP2's are split again
    first, second = nats
    if abs(second - first) > PROBE_TOLERANCE * first:
        raise SettingsError(
            [
                f"MODEL={name}: {type(model.lm).__name__} cannot keep the examples of a window apart: the "
                f"same one has a loss of {first:.4f} nats as the first and {second:.4f} as the second. "
                "Choose a model of another kind, such as Llama, Qwen3 or Gemma 3."
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
    sizes = {ours: getattr(config, theirs, None) for ours, theirs in names.items()}
    return {ours: value for ours, value in sizes.items() if isinstance(value, int) and value > 0}


def longest(folder: Path) -> int | None:
    """Tokens that the model was made for, where its config.json says so."""
    value = getattr(configuration(folder).get_text_config(), "max_position_embeddings", None)
    return value if isinstance(value, int) and value > 0 else None
