"""`make export` of a fine-tuned run: what was trained goes into a copy of MODEL's files.

    each file of MODEL -> its tensors, changed by what was trained for them -> a file of the same name

One tensor is in memory at a time, and the adapters. What is trained has the names of transformers'
classes. Their own conversion, backwards, says which tensors of the files those are: the experts of a
mixture are one weight in memory and one tensor each in the files. Tensors that the class does not take
stay as they are. Every tensor keeps its type.

The exported model stops: the tokens that end a reply are in config.json, generation_config.json and
the tokenizer's files, whatever the base model ends a text with.
"""

import functools
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from export import card, gguf_file, place, weight_files
from export.export_command import report, run_export
from export.stored import Weights
from export.weight_files import fingerprint, write_json
from finetune import hf_model, lite, model_folder
from finetune.adapter import Adapters, adapters_of, in_file
from finetune.chat_template import ChatTemplate
from finetune.hf_model import Tuned
from finetune.weights import plain, put
from record.regular_file import limit_silence
from record.run_paths import RunPaths
from settings.config import Config
from settings.resolve import show_path
from settings.terminal import complain
from train.checkpoint.identity import check_identity
from train.data.tokenizer import TokenizerError
from train.generate import load_run
from train.model import hf_import
from train.model.hf_import import ForeignError, read_json, some
from train.run_folder import stored_config

COPIED = re.compile(r"[^.].*\.(json|jinja|model|txt)")  # files next to the weights
CACHED = 4  # weights whose tensors are kept: those of a block are neighbors in the files
Trained = Callable[[str], Tensor]  # name of a weight -> what was trained for it, float32


def export(config: Config, paths: RunPaths) -> None:
    """Write the folder, check it, and give it its name. Raises ExpectedError, OSError."""
    stored = stored_config(paths)
    settings = load_run.settings_of_run(paths, stored)
    config = load_run.settings_for_use(config, settings, ())
    base = model_folder.find(config)
    if stored["attempts"][0].get("model_fingerprint") != fingerprint(base):
        raise ForeignError(
            f"MODEL={config.model}: {show_path(base)} is not the model that was fine-tuned. Restore "
            "its files."
        )
    if config.gguf:
        gguf_file.check_model(read_json(base / "config.json"))
        gguf_file.find_pre_tokenizer(read_json(base / "tokenizer.json"))
    template = find_template(base, config)
    with limit_silence(paths.checkpoints, config.start_timeout_s):
        checkpoint, manifest = load_run.checkpoint_of(config, paths)
    check_identity(stored, config, checkpoint, manifest)
    names, trained = open_trained(config, base, checkpoint, manifest)
    repository = config.model if base == model_folder.kept_at(config) else ""
    copied = [path for path in base.iterdir() if COPIED.fullmatch(path.name)]
    size = size_of(hf_import.weight_files(base)) * (1 + config.gguf) + size_of(copied)
    with place.new_export(paths.folder, size) as folder:
        hashes = merge(base, folder, names, trained, is_added=bool(config.lora_rank))
        for path in copied:
            shutil.copyfile(path, folder / path.name)
        facts = {
            "run": config.run_name,
            "step": manifest["step"],
            "model": repository or Path(config.model).name,  # exports are published: no path
        }
        if template:
            facts["stop_token"] = template.stop_token
            write_stop(folder, template)
        place.write_facts(folder, facts)
        shapes = {name: one.shape for name, one in hf_import.tensors(folder).items()}
        about = card.collect(config, paths, stored | {"checkpoint": manifest}, shapes)
        (folder / "README.md").write_text(card.tuned(about, repository), encoding="utf-8")
        if config.gguf:
            gguf_file.write(folder, config.run_name)
        place.seal(folder, hashes)
    report(paths.folder / "export", f"{config.model} with step {manifest['step']} of {paths.name}")


def size_of(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def find_template(base: Path, config: Config) -> ChatTemplate | None:
    """Return the chat template that the run was trained with.

    None if it ends a reply with no token: commit 9fc3810 trained without one.
    """
    try:
        return ChatTemplate(base, config.stop_token, config.model)
    except TokenizerError as error:
        complain(f"The export does not stop after a reply: {error}")
        return None


# ---- Weights


def open_trained(
    config: Config, base: Path, checkpoint: Path, manifest: dict[str, Any]
) -> tuple[list[str], Trained]:
    """Return the names of the weights that were trained, and what reads each from a checkpoint.

    With adapters it returns what is added to a weight, otherwise the weight. Raises CheckpointError.
    """
    adapters = Adapters.of(config)
    if adapters is None:
        weights = Weights(checkpoint)
        names = [name.removeprefix("lm.") for name in weights.shapes]
        return names, lambda name: weights.read(f"lm.{name}")
    lm = hf_model.on_meta(hf_model.configuration(base), torch.float32)
    adapters.join(lm)
    read_adapters(Tuned(lm, torch.float32), checkpoint, is_lite=manifest.get("mode") == "lite")
    layers = {
        f"{plain(f'{name}.')}{getattr(layer, 'parameter_name', 'weight')}": layer
        for name, layer in lm.named_modules()
        if hasattr(layer, "lora_A")
    }

    def read_delta(name: str) -> Tensor:
        base_layer = layers[name].get_base_layer()
        base_layer.to_empty(device="cpu")  # peft moves the result to where the weight is
        delta = layers[name].get_delta_weight("default").detach()
        base_layer.to_empty(device="meta")
        return delta

    return list(layers), read_delta


def read_adapters(shell: Tuned, checkpoint: Path, is_lite: bool) -> None:
    """Put the adapters of a checkpoint into a model on the meta device. Raises CheckpointError."""
    if is_lite:
        file = safe_open(checkpoint / lite.FILE, framework="pt")
        for name in adapters_of(shell):
            put(shell, name, nn.Parameter(file.get_tensor(in_file(name))))
        return
    weights = Weights(checkpoint)
    for name in adapters_of(shell):
        put(shell, name, nn.Parameter(weights.read(name)))


def merge(
    base: Path, folder: Path, names: list[str], trained: Trained, is_added: bool
) -> dict[str, str]:
    """Write each file of the base model, changed by what was trained.

    Args:
        names: of weights that were trained.
        is_added: what was trained is added to the weight, rather than replacing it.

    Returns:
        File name -> sha256 of what was written. Raises ForeignError if the files have no tensor for
        something that was trained.
    """
    from transformers.core_model_loading import revert_weight_conversion

    skeleton = hf_model.on_meta(hf_model.configuration(base), torch.float32)
    weights = dict(skeleton.named_parameters(remove_duplicate=False))
    weight_of = {}  # tensor in the files -> weight of the class that it is a part of
    for name in names:
        for tensor in revert_weight_conversion(skeleton, {name: weights[name]}):
            weight_of[tensor] = name
    missing = set(weight_of)

    @functools.lru_cache(maxsize=CACHED)
    def read_trained(name: str) -> dict[str, Tensor]:
        return dict(revert_weight_conversion(skeleton, {name: trained(name)}))

    def read_merged(file: Any, tensor: str) -> Tensor:
        value: Tensor = file.get_tensor(tensor)
        own = tensor
        if tensor not in weight_of:  # the files may hold a tied weight under both names
            own = skeleton.all_tied_weights_keys.get(tensor)
        if own not in weight_of:
            return value
        missing.discard(own)
        new = read_trained(weight_of[own])[own]
        if is_added:
            new = value.float() + new
        return weight_files.check_finite(tensor, new.to(value.dtype))

    hashes = {}
    for path in hf_import.weight_files(base):
        header = weight_files.read_header(path)
        with hf_import.open_file(path) as file:
            tensors = (read_merged(file, name) for name in file.offset_keys())
            hashes[path.name] = weight_files.write_file(folder / path.name, header, tensors)
    if missing:
        raise ForeignError(
            f"{show_path(base)}: Its files lack {some(sorted(missing))}, which was trained. Restore them."
        )
    return hashes


# ---- Where a reply ends


def write_stop(folder: Path, template: ChatTemplate) -> None:
    """Make the tokens that end a reply the end-of-sequence tokens of an export."""
    stops = template.stop_ids
    config = read_json(folder / "config.json")
    generation = {
        key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key) is not None
    }
    if (folder / "generation_config.json").is_file():
        generation = read_json(folder / "generation_config.json")
    before = generation.get("eos_token_id", config.get("eos_token_id"))
    if not isinstance(before, list):
        before = [before]
    others = {None, *stops, *template.ids_inside_reply()}
    ends = [*stops, *(token for token in before if token not in others)]
    config["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation | {"eos_token_id": ends})
    if template.writes_eos_token():
        return
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if path.is_file():
            write_json(path, read_json(path) | {"eos_token": template.stop_token})


def main() -> int:
    return run_export(export)


if __name__ == "__main__":
    sys.exit(main())
