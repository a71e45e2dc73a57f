"""LoRA (Hu et al. 2021), by peft: small matrices beside frozen ones, and these alone are trained, saved and sent.

    attention   every matrix of the attention                    mlp    every matrix of the MLP: of a mixture's, that of
    experts     those of a mixture's experts, packed as they are        all tokens' (shared) and of dense blocks
    q_proj ..   matrices by the last part of their name

An adapter W + alpha / rank B A begins with B = 0, so that the model computes at first what it did. A is drawn by SEED
and its name alone, the same on every number of processes. The names in files are peft's.
"""

import contextlib
import dataclasses
import hashlib
import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from finetune.weights import put
from settings import SettingsError
from settings.config import Config
from train.distributed.parallel import part_of
from train.model.hf_import import some

PART = re.compile(r"(?:^|\.)layers\.\d+\.(.+)$")  # a name within its block
GROUPS = {
    "attention": re.compile(r"attn|attention"),
    "mlp": re.compile(r"mlp|feed_forward|shared_expert"),
}
ROUTERS = re.compile(
    r"(^|\.)(gate|router|shared_expert_gate)$"
)  # they choose experts: no matrix of the MLP
PREFIX, NAME = (
    "base_model.model.",
    "default",
)  # as peft has names in files, and what it calls the one adapter


@dataclasses.dataclass(frozen=True)
class Adapters:
    """What LORA_RANK and its like ask for."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]

    @classmethod
    def of(cls, c: Config) -> "Adapters | None":
        """None where all weights are trained."""
        if not c.lora_rank:
            return None
        return cls(
            c.lora_rank,
            c.lora_alpha or 2.0 * c.lora_rank,
            c.lora_dropout,
            tuple(c.lora_targets.split(",")),
        )

    def join(self, lm: Any) -> None:
        """Put adapters into a model of transformers' on the meta device, and freeze the rest. Raises SettingsError."""
        from peft import inject_adapter_in_model

        config, modules, parameters = self.config(lm), *self.chosen(lm)
        inject_adapter_in_model(config, lm, NAME, low_cpu_mem_usage=True)
        for name, weight in list(lm.named_parameters()):
            if is_adapter(name):
                put(
                    lm,
                    name,
                    nn.Parameter(torch.empty_like(weight, dtype=torch.float32, device="meta")),
                )
        got = {
            match[1].split(".lora_A.")[0].replace(".base_layer", "")
            for name, _ in lm.named_parameters()
            if ".lora_A." in name and (match := PART.search(name))
        }
        wanted = {*modules, *(name.rpartition(".")[0] for name in parameters)}
        assert got == wanted, f"peft has put adapters at {got}, not at {wanted}"

    def config(self, lm: Any, model: str = "") -> Any:
        """peft's configuration for a model without adapters; model: where that is, for the file.

        Of a mixture's kind peft takes gate_proj, up_proj and down_proj, wherever they are, for the names that packed
        experts once had. Those matrices are named as parameters instead, which it takes as they are.
        """
        try:
            from peft import LoraConfig
            from peft.utils.transformers_weight_conversion import (
                convert_peft_config_for_transformers,
            )
        except ImportError:
            raise SettingsError(
                [
                    f"LORA_RANK={self.rank}: the package peft is not installed, which make finetune "
                    "installs; run scripts/setup.sh --finetune"
                ]
            ) from None
        modules, parameters = self.chosen(lm)
        wrapped = set()
        for name in modules:
            probe = LoraConfig(target_modules=[name])
            with contextlib.suppress(ValueError):  # it wants gate_proj and up_proj together
                convert_peft_config_for_transformers(probe, lm, None)
                if name in (probe.target_modules or ()):
                    continue
            wrapped.add(name)
        modules = [name for name in modules if name not in wrapped]
        parameters = sorted({*parameters, *(f"{name}.weight" for name in wrapped)})
        if parameters and self.dropout:
            raise SettingsError(
                [
                    f"LORA_DROPOUT={self.dropout:g}: peft has none for {some(parameters, 3)}; set "
                    "LORA_DROPOUT=0, or LORA_TARGETS=attention"
                ]
            )
        alpha: Any = (
            int(self.alpha) if self.alpha.is_integer() else self.alpha
        )  # peft declares an int, and takes both
        return LoraConfig(
            r=self.rank,
            lora_alpha=alpha,
            lora_dropout=self.dropout,
            bias="none",
            target_modules=modules or None,
            target_parameters=parameters or None,
            task_type="CAUSAL_LM",
            base_model_name_or_path=model or None,
        )

    def chosen(self, lm: Any) -> tuple[list[str], list[str]]:
        """Names within a block of the matrices, and of the packed experts, that get an adapter. Raises SettingsError
        where one of the targets is nowhere; beside others mlp may be, in a mixture that has experts alone."""
        matrices = sorted(
            {
                part[1]
                for name, module in lm.named_modules()
                if isinstance(module, nn.Linear) and (part := PART.search(name))
            }
        )
        experts = sorted(
            {
                part[1]
                for name, weight in lm.named_parameters()
                if weight.ndim == 3 and (part := PART.search(name))
            }
        )
        modules, parameters, nowhere = set[str](), set[str](), []
        for target in self.targets:
            if group := GROUPS.get(target):
                matches = {
                    name for name in matrices if group.search(name) and not ROUTERS.search(name)
                }
            else:
                matches = {name for name in matrices if f".{name}".endswith(f".{target}")}
            packed = {
                name for name in experts if target == "experts" or f".{name}".endswith(f".{target}")
            }
            modules |= matches
            parameters |= packed
            if not matches and not packed:
                nowhere.append(target)
        if nowhere == ["mlp"] and experts and (modules or parameters):
            nowhere = []
        if nowhere:
            there = sorted(
                {name.rpartition(".")[2] for name in matrices} | ({"experts"} if experts else set())
            )
            groups = [
                name
                for name, group in GROUPS.items()
                if any(group.search(one) and not ROUTERS.search(one) for one in matrices)
            ]
            raise SettingsError(
                [
                    f"LORA_TARGETS={','.join(self.targets)}: the model has no {some(nowhere)}; there are "
                    f"{some([*groups, *there], 20)}"
                ]
            )
        return sorted(modules), sorted(parameters)

    def fill(self, model: nn.Module, c: Config, device: torch.device) -> None:
        """Give the adapters, still on the meta device, their first values there, each process its own part."""
        for name, weight in list(model.named_parameters()):
            if is_adapter(name):
                values = first_values(name, weight.shape, c.seed)
                put(model, name, nn.Parameter(part_of(values, weight).to(device)))


def is_adapter(name: str) -> bool:
    """Whether a weight of this name is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def first_values(name: str, shape: torch.Size, seed: int) -> Tensor:
    """B: zeros. A: uniform within 1 / sqrt(width), as peft has it."""
    if ".lora_B." in name:
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator)


def in_file(name: str) -> str:
    """What peft calls a weight of Tuned's in adapter_model.safetensors."""
    return PREFIX + name.removeprefix("lm.").replace(f".{NAME}.", ".")


def adapters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> adapter, or this process's part of it."""
    return {name: weight for name, weight in model.named_parameters() if is_adapter(name)}
