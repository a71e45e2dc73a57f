"""`make export` of a pretrained run.

checkpoint, verified -> weights, one at a time -> config, tokenizer, card -> read back -> its name
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from export import card, files, gguf_file, place, weight_files
from export.export_command import report, run_export, say
from export.stored import Weights
from record.run_paths import RunPaths
from settings import SettingsError
from settings.config import Config
from settings.resolve import find_explicit, show_path
from train.data.tokenizer import Vocabulary
from train.generate import load_run
from train.model import hf_import
from train.model.hf_import import their_name
from train.model.model import NORM_EPS


def export(config: Config, paths: RunPaths) -> None:
    """Write the folder, check it, and give it its name. Raises ExpectedError, OSError."""
    found = load_run.find(config, find_explicit())
    if not found.manifest:
        raise SettingsError(
            [
                f"INIT_FROM={config.init_from}: Is in Hugging Face format already. Leave INIT_FROM out, "
                "and set RUN_NAME to a run that `make runs` lists."
            ]
        )
    config = found.config
    vocabulary = load_run.vocabulary_of(found)
    tokenizer = files.tokenizer_json(vocabulary.content)
    if config.gguf:
        gguf_file.find_pre_tokenizer(json.loads(tokenizer))
    weights = Weights(found.folder)
    ours = exported_names(config, weights)
    shapes = hf_import.expected(config)
    shapes = {name: shapes[name] for name in ours}

    def read(name: str) -> Tensor:
        """Return a weight without the rows that pad the vocabulary."""
        return weights.read(ours[name])[: shapes[name][0]]

    size = weight_files.size_of(shapes, config.dtype) * (1 + config.gguf) + len(tokenizer)
    with place.new_export(paths.folder, size) as folder:
        say(f"Verified step {found.step:,} of {config.run_name} ({show_path(found.folder)}).")
        hashes = weight_files.write(folder, shapes, config.dtype, read)
        (folder / "tokenizer.json").write_bytes(tokenizer)
        write_beside(folder, found, paths, vocabulary, shapes)
        hf_import.check(folder, config)  # as a run that starts from this folder does
        if config.gguf:
            gguf_file.write(folder, config.run_name)
        place.seal(folder, hashes)
    report(paths.folder / "export", f"step {found.step:,} of {config.run_name} in {config.dtype}")


def exported_names(config: Config, weights: Weights) -> dict[str, str]:
    """Return the name in the export -> ours, in the order of the model.

    Raises ForeignError if the checkpoint holds other weights than a model of these settings.
    """
    wanted = hf_import.expected(config)
    names = {}
    shapes = {}
    for name, shape in weights.shapes.items():
        rows = config.vocab_size if name in hf_import.OF_ENTRIES else shape[0]
        names[their_name(name)] = name
        shapes[their_name(name)] = (rows, *shape[1:])
    if shapes != wanted:
        raise hf_import.ForeignError(
            f"{weights.folder}: Its weights are not those of the settings in the run's config.json. "
            "Restore that file from a copy."
        )
    kinds = list(wanted)  # the embedding, then each kind of weight of all layers
    order = sorted(wanted, key=lambda name: (layer_of(names[name]), kinds.index(name)))
    return {name: names[name] for name in order}


def layer_of(name: str) -> float:
    """Return the layer of a weight: -1 for the embedding, inf for the last norm and the head."""
    parts = name.split(".")
    if parts[0] == "layers":
        return int(parts[1])
    return -1 if parts[0] == "embed_tokens" else math.inf


def write_beside(
    folder: Path,
    found: load_run.Found,
    paths: RunPaths,
    vocabulary: Vocabulary,
    shapes: weight_files.Shapes,
) -> None:
    """Write all files except the weights and the tokenizer."""
    config = found.config
    norm_eps = NORM_EPS if found.norm_eps is None else found.norm_eps
    template, ends = files.chat_of(vocabulary)
    facts: dict[str, Any] = {"run": config.run_name, "step": found.step}
    if ends:
        facts["stop_token"] = vocabulary.tokenizer.id_to_token(ends[0])
    contents = {
        "config.json": files.config_json(config, vocabulary, config.dtype, norm_eps),
        "generation_config.json": files.generation_config(vocabulary, ends),
        "tokenizer_config.json": files.tokenizer_config(config, vocabulary, template),
    }
    for name, content in contents.items():
        place.write_json(folder / name, content)
    place.write_facts(folder, facts)
    about = card.collect(config, paths, found.facts, shapes)
    (folder / "README.md").write_text(card.pretrained(about, bool(template)), encoding="utf-8")


def main() -> int:
    return run_export(export)


if __name__ == "__main__":
    sys.exit(main())
