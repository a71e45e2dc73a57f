"""`make export` of a pretrained run.

checkpoint, verified -> weights, one at a time -> config, tokenizer, card -> read back -> its name
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from export import card, files, gguf_file, place, weight_files
from export.export_command import report, run_export
from export.stored import Weights
from record.run_paths import RunPaths
from settings import SettingsError
from settings.config import Config
from settings.resolve import find_explicit
from settings.terminal import say
from train.data.tokenizer import Vocabulary
from train.generate import load_run
from train.model import hf_import
from train.model.model import NORM_EPS, Transformer


def export(config: Config, paths: RunPaths) -> None:
    """Write the folder, check it, and give it its name. Raises ExpectedError, OSError."""
    saved = load_run.find(config, find_explicit())
    if not saved.manifest:
        raise SettingsError(
            [
                f"INIT_FROM={config.init_from}: Is in Hugging Face format already. Leave INIT_FROM out, "
                "and set RUN_NAME to a run that `make runs` lists."
            ]
        )
    config = saved.config
    vocabulary = load_run.vocabulary_of(saved)
    tokenizer = files.tokenizer_json(vocabulary.content)
    if config.gguf:
        gguf_file.find_pre_tokenizer(json.loads(tokenizer))
    weights = Weights(saved.folder)
    check_shapes(config, weights)
    shapes = hf_import.expected(config)

    def read(name: str) -> Tensor:
        """Return a weight without the rows that pad the vocabulary."""
        return weights.read(name.removeprefix("model."))[: shapes[name][0]]

    size = sum(weight_files.sizes_of(shapes, config.dtype).values())
    with place.new_export(paths.folder, size * (1 + config.gguf) + len(tokenizer)) as folder:
        say(f"Verified step {saved.step:,} of {config.run_name} ({saved.source}).")
        hashes = weight_files.write(folder, shapes, config.dtype, read)
        (folder / "tokenizer.json").write_bytes(tokenizer)
        has_template = write_beside(folder, saved, vocabulary)
        about = card.collect(config, paths, saved.facts, shapes)
        (folder / "README.md").write_text(card.pretrained(about, has_template), encoding="utf-8")
        hf_import.check(folder, config)  # as a run that starts from this folder does
        if config.gguf:
            gguf_file.write(folder, config.run_name)
        place.seal(folder, hashes)
    report(paths.folder / "export", f"step {saved.step:,} of {config.run_name} in {config.dtype}")


def check_shapes(config: Config, weights: Weights) -> None:
    """Raise ForeignError if a checkpoint holds other weights than a model of these settings."""
    with torch.device("meta"):
        model = Transformer(config.replace(seq_len=2))
    if weights.shapes != {name: tuple(it.shape) for name, it in model.named_parameters()}:
        raise hf_import.ForeignError(
            f"{weights.folder}: Its weights are not those of the settings in the run's config.json. "
            "Restore that file from a copy."
        )


def write_beside(folder: Path, saved: load_run.SavedRun, vocabulary: Vocabulary) -> bool:
    """Write the JSON files. Returns whether they have a chat template."""
    config = saved.config
    norm_eps = NORM_EPS if saved.norm_eps is None else saved.norm_eps
    template, ends = files.chat_of(vocabulary)
    facts: dict[str, Any] = {"run": config.run_name, "step": saved.step}
    if ends:
        facts["stop_token"] = vocabulary.tokenizer.id_to_token(ends[0])
    contents = files.json_files(config, vocabulary, config.dtype, norm_eps)
    for name, content in contents.items():
        weight_files.write_json(folder / name, content)
    place.write_facts(folder, facts)
    return bool(template)


def main() -> int:
    return run_export(export)


if __name__ == "__main__":
    sys.exit(main())
