"""What a fine-tuning has trained as a folder of Hugging Face's, RUNS_DIR/RUN_NAME/export: adapters merged into MODEL.

    each file of MODEL's folder -> its tensors, and to each what was trained for it -> a file of the same name

A file at a time is in memory, and the adapters. What is trained has the names of transformers' classes; its own
conversion, backwards, says which tensors of the files those are (the experts of a mixture, packed in memory, lie one by
one there). Tensors that the model does not take stay as they are. Everything has the type that MODEL's files have.

`python -m finetune.merge` exits with 0; 64 a setting is bad; 78 checkpoint, model or folder are bad; 130 by Ctrl-C.
"""

import dataclasses
import functools
import logging
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from export import gguf_file, place
from export.stored import Weights
from finetune import hf_model, lite, origin
from finetune.adapter import Adapters, in_file
from finetune.hf_model import Tuned
from finetune.weights import plain
from record import number_formats, status
from record.default_run import choose_run
from record.locks import RunFolderError
from record.regular_file import limit_silence
from record.run_paths import RunPaths
from settings import ROOT, ExpectedError, SettingsError, explain_error, load_config
from settings.checks import PRETRAINING
from settings.config import SETTINGS, Config
from settings.declare import FREE
from settings.resolve import show_path
from settings.terminal import complain
from train.checkpoint.identity import check_identity
from train.generate import load_run
from train.model.hf_import import ForeignError, read_json, some, weight_files
from train.run_folder import stored_config

BAD_SETTING, BAD_DATA, STOPPED = 64, 78, 130
KEPT = ("*.json", "*.jinja", "*.model", "*.txt")  # beside the weights
SETTINGS_SHOWN = (
    "DATA",
    "EPOCHS",
    "SEQ_LEN",
    "BATCH_TOKENS",
    "LEARNING_RATE",
    "LORA_RANK",
    "LORA_ALPHA",
    "LORA_TARGETS",
)
LATELY = 4  # weights whose tensors are kept: those of a block lie together
log = logging.getLogger(__name__)


class Source(Protocol):
    """What was trained."""

    @property
    def names(self) -> list[str]:
        """The weights of transformers' class that it changes."""

    def value(self, name: str) -> Tensor:
        """For a weight: what is added to it, or what stands in its place, float32."""


class Pair(NamedTuple):
    """An adapter as peft lays it out: a (experts * rank, in), b (out, rank * experts). transposed: packed experts that
    the class has as (experts, in, out)."""

    a: Tensor
    b: Tensor
    experts: int
    transposed: bool


@dataclasses.dataclass(frozen=True)
class Added:
    """Adapters: alpha / rank B A is added. pairs: by weight."""

    pairs: dict[str, Pair]
    scale: float

    @property
    def names(self) -> list[str]:
        return list(self.pairs)

    def value(self, name: str) -> Tensor:
        a, b, experts, transposed = self.pairs[name]
        if experts == 1:
            return b @ a * self.scale
        a, b = a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts)
        return torch.einsum("ore,eri->eio" if transposed else "ore,eri->eoi", b, a) * self.scale


@dataclasses.dataclass(frozen=True)
class Replaced:
    """All weights of a full fine-tuning."""

    weights: Weights

    @property
    def names(self) -> list[str]:
        return [name.removeprefix("lm.") for name in self.weights.shapes]

    def value(self, name: str) -> Tensor:
        return self.weights.read(f"lm.{name}")


def adapters_in(folder: Path, manifest: dict[str, Any], c: Config, lm: Any) -> Added:
    """Of a checkpoint. lm: of transformers', with adapters, on the meta device. Raises CheckpointError."""
    adapters = Adapters.of(c)
    assert adapters
    if manifest.get("mode") == "lite":
        with safe_open(folder / lite.FILE, framework="pt") as file:
            held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
    else:
        stored = Weights(folder)
        held = {in_file(name): stored.read(name) for name in stored.shapes}
    shell, pairs = Tuned(lm, torch.float32), dict[str, Pair]()
    weights = {plain(name): weight for name, weight in lm.named_parameters()}
    for name, module in shell.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        a, b = (held[in_file(f"{name}.{which}.default.weight")] for which in ("lora_A", "lora_B"))
        own = (
            plain(f"{name}.").rstrip(".").removeprefix("lm.")
            + f".{getattr(module, 'parameter_name', 'weight')}"
        )
        pairs[own] = Pair(
            a,
            b,
            len(weights[own]) if weights[own].ndim == 3 else 1,
            getattr(module.get_base_layer(), "is_transposed", False),
        )
    return Added(pairs, adapters.alpha / adapters.rank)


def tensors_of(skeleton: Any, names: list[str]) -> dict[str, str]:
    """Tensor in the files -> weight of the class that it is a part of."""
    from transformers.core_model_loading import revert_weight_conversion

    shapes = dict(skeleton.named_parameters(remove_duplicate=False))
    return {
        tensor: name
        for name in names
        for tensor in revert_weight_conversion(skeleton, {name: shapes[name]})
    }


def write(base: Path, target: Path, skeleton: Any, source: Source) -> list[str]:
    """Every file of the model's folder, changed by what was trained; returns the tensors that were. Raises
    ForeignError where there is none for something that was trained."""
    from transformers.core_model_loading import revert_weight_conversion

    weight_of = tensors_of(skeleton, source.names)
    tied = dict(skeleton.all_tied_weights_keys)
    changed: list[str] = []

    @functools.lru_cache(maxsize=LATELY)
    def parts(name: str) -> dict[str, Tensor]:
        return dict(revert_weight_conversion(skeleton, {name: source.value(name)}))

    for path in weight_files(base):
        made: dict[str, Tensor] = {}
        with safe_open(path, framework="pt") as file:
            for tensor in file.keys():  # noqa: SIM118 (it is no dictionary)
                values = file.get_tensor(tensor)
                weight = weight_of.get(tensor) or weight_of.get(tied.get(tensor, ""))
                if weight:
                    new = parts(weight)[tensor if tensor in weight_of else tied[tensor]]
                    values = (
                        (values.float() + new if isinstance(source, Added) else new)
                        .to(values.dtype)
                        .contiguous()
                    )
                    changed.append(tensor)
                made[tensor] = values
        save_file(made, target / path.name, metadata={"format": "pt"})
        log.info(
            "%s: %d tensors, %s",
            path.name,
            len(made),
            number_formats.size(sum(v.nbytes for v in made.values())),
        )
    if missing := sorted(weight_of.keys() - set(changed)):
        raise ForeignError(
            f"{show_path(base)}: its files lack {some(missing)}, which was trained; bring that MODEL back"
        )
    for pattern in KEPT:
        for path in base.glob(pattern):
            if not path.name.startswith("."):
                shutil.copyfile(path, target / path.name)
    return changed


def export(c: Config, paths: RunPaths) -> None:
    """Make the folder and give it its name. Raises what main() catches."""
    target = paths.folder / "export"
    place.refuse_to_lose(target)
    before = stored_config(paths)
    tuned = load_run.settings_of_run(paths, before)
    free = [name.lower() for name, field in SETTINGS.items() if field.resume == FREE]
    tuned = dataclasses.replace(tuned, **{name: getattr(c, name) for name in free})
    base = origin.find(tuned)
    if before["attempts"][0].get("model_fingerprint") != hf_model.fingerprint(base):
        raise ForeignError(
            f"MODEL={tuned.model}: {show_path(base)} is not what was fine-tuned; bring that back"
        )
    if c.gguf:
        gguf_file.check_model(read_json(base / "config.json"))
        gguf_file.find_pre_tokenizer(read_json(base / "tokenizer.json"))
    with limit_silence(paths.checkpoints, c.start_timeout_s):
        folder, manifest = load_run.checkpoint_of(c, paths)
    check_identity(before, tuned, folder, manifest)
    config = hf_model.configuration(base)
    skeleton = hf_model.on_meta(config, torch.float32)
    source: Source
    if adapters := Adapters.of(tuned):
        lm = hf_model.on_meta(config, torch.float32)
        adapters.join(lm)
        source = adapters_in(folder, manifest, tuned, lm)
    else:
        source = Replaced(Weights(folder))
    with place.alone(paths.folder), place.unfinished(paths.folder) as half:
        changed = write(base, half, skeleton, source)
        facts = {
            "run": c.run_name,
            "step": manifest["step"],
            "model": tuned.model,
            "val_loss": manifest.get("val_loss"),
            "settings": {name: before["settings"].get(name) for name in SETTINGS_SHOWN},
        }
        place.write_facts(half, facts)
        if c.gguf:
            gguf_file.write(half, c.run_name)
        place.seal(half)
        place.replace(half, target)
    sys.stdout.write(
        f"{show_path(target)}: {tuned.model} with step {manifest['step']} of {c.run_name}, {len(changed)} "
        "tensors changed; transformers reads it\n"
    )


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    warnings.filterwarnings(
        "ignore", message="torch.distributed is disabled"
    )  # DCP, in one process
    paths = None
    try:
        c = load_config(defaults=choose_run(), without=(*PRETRAINING, *load_run.OF_TRAINING))
        paths = RunPaths.of(c.runs_dir, c.run_name, ROOT)
        if not stored_config(paths):
            raise RunFolderError(status.explain_missing(paths))
        export(c, paths)
    except SettingsError as error:
        complain(explain_error(error))
        return BAD_SETTING
    except (ExpectedError, place.PlaceError) as error:
        complain(error)
        return BAD_DATA
    except (OSError, SafetensorError) as error:
        where = getattr(error, "filename", None) or (paths.folder if paths else "")
        complain(
            f"{where}: cannot be read or written ({error}); make room on its disk, or mend its "
            "permissions"
        )
        return BAD_DATA
    except KeyboardInterrupt:
        complain("stopped; nothing was exported, and what was there is as it was")
        return STOPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
