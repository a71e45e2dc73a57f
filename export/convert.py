"""make export: a checkpoint of RUN_NAME as a folder of Hugging Face's, runs/RUN_NAME/export.

    checkpoint, verified -> weights, one at a time -> config, tokenizer, card -> read back, compared -> its name

Exit codes: 0; 64 a setting is bad; 78 checkpoint, tokenizer or folder are bad; 130 stopped by Ctrl-C. Whatever ends it,
an export that was there before is as it was, until the new one is whole.
"""

import json
import logging
import math
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

from analysis.energy.join import add_energy
from analysis.energy.result import Energy
from analysis.runs import Run, RunError, read_run
from export import card, files, gguf_file, place, weight_files
from export.stored import Weights
from record import number_formats
from record.run_paths import RunPaths
from settings import ROOT, ExpectedError, SettingsError, explain_error
from settings.config import Config
from settings.resolve import find_explicit as given_settings
from settings.resolve import show_path as from_root
from settings.terminal import complain
from train.data.tokenizer import Vocabulary
from train.generate import chat_format, load_run
from train.model import hf_import
from train.model.hf_import import their_name
from train.model.model import NORM_EPS
from train.run_folder import stored_config

BAD_SETTING, BAD_DATA, STOPPED = 64, 78, 130

BESIDE = 2**24  # bytes that all files but the weights and the tokenizer take at most


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    warnings.filterwarnings(
        "ignore", message="torch.distributed is disabled"
    )  # DCP, in one process
    try:
        c, _ = load_run.settings_of_command()
        paths = RunPaths.of(c.runs_dir, c.run_name, ROOT)
        if (
            stored_config(paths).get("settings", {}).get("MODEL")
        ):  # of others, or ours as theirs: merged
            os.execv(sys.executable, [sys.executable, "-m", "finetune.merge"])
        found = load_run.find(c, given_settings())
        if not found.manifest:
            raise SettingsError(
                [
                    f"INIT_FROM={c.init_from}: is in Hugging Face's format already; make export takes the "
                    "checkpoint of a run: leave INIT_FROM out, and give a RUN_NAME that make runs lists"
                ]
            )
        with place.alone(paths.folder):
            export(found, paths, load_run.vocabulary_of(found))
    except SettingsError as error:
        complain(explain_error(error))
        return BAD_SETTING
    except (ExpectedError, place.PlaceError, weight_files.WeightsError) as error:
        complain(error)
        return BAD_DATA
    except OSError as error:
        complain(
            f"{error.filename or paths.folder}: cannot be read or written ({error.strerror}); make room "
            "on its disk, or mend its permissions"
        )
        return BAD_DATA
    except KeyboardInterrupt:
        complain("stopped; nothing was exported, and what was there is as it was")
        return STOPPED
    return 0


def export(found: load_run.Found, paths: RunPaths, vocabulary: Vocabulary) -> None:
    """Make the folder, check it, and give it its name. Raises what main() catches."""
    c, target = found.config, paths.folder / "export"
    place.refuse_to_lose(target)
    weights = Weights(found.folder)
    shapes = exported_shapes(c, weights)
    tokenizer = files.tokenizer_json(vocabulary.content)
    size = sum(math.prod(shape) for shape in shapes.values()) * weight_files.TYPES[c.dtype][1]
    if c.gguf:
        gguf_file.find_pre_tokenizer(json.loads(tokenizer))
    check_space(paths.folder, size * (1 + c.gguf) + len(tokenizer) + BESIDE)
    say(
        f"Verified step {found.step:,} of {c.run_name} ({from_root(found.folder)}). Writing "
        f"{number_formats.size(size)} of weights in {c.dtype}."
    )
    with place.unfinished(paths.folder) as folder:
        hashes = weight_files.write(
            folder,
            {their_name(name): shape for name, shape in shapes.items()},
            c.dtype,
            Rows(weights, shapes).read,
        )
        write_beside(folder, found, paths, vocabulary, tokenizer, shapes)
        if wrong := weight_files.differing(folder, hashes):
            raise weight_files.WeightsError(
                f"{folder}: read back, {hf_import.some(wrong)} are not what was written; the disk "
                "or the memory of this machine is at fault. Call again, elsewhere if it stays so"
            )
        hf_import.check(
            folder, c
        )  # the folder by its own config.json and headers, as a start of training
        if c.gguf:
            gguf_file.write(folder, c.run_name)
        place.seal(folder)
        replaces = target.is_dir()
        place.replace(folder, target)
    tell(found, target, replaces, vocabulary)


class Rows:
    """Weights as they are exported: by their names there, and without the rows that pad the vocabulary."""

    def __init__(self, weights: Weights, shapes: weight_files.Shapes):
        self.weights, self.rows = (
            weights,
            {their_name(name): (name, shape[0]) for name, shape in shapes.items()},
        )

    def read(self, their: str) -> Any:
        name, rows = self.rows[their]
        return self.weights.read(name)[:rows]


def exported_shapes(c: Config, weights: Weights) -> dict[str, tuple[int, ...]]:
    """Our name -> shape without padding, in the order of the model. Raises CheckpointError where the checkpoint holds
    other weights than a model of these settings."""
    wanted = hf_import.expected(c)
    shapes = {
        name: (c.vocab_size, *shape[1:]) if name in hf_import.OF_ENTRIES else shape
        for name, shape in weights.shapes.items()
    }
    if {their_name(name): shape for name, shape in shapes.items()} != wanted:
        raise hf_import.ForeignError(
            f"{weights.folder}: its weights are not those of the settings in config.json; "
            "restore that file"
        )
    order = list(wanted)  # embedding, then each kind of weight of all layers
    return dict(
        sorted(
            shapes.items(), key=lambda item: (layer_of(item[0]), order.index(their_name(item[0])))
        )
    )


def layer_of(name: str) -> float:
    """Where a weight stands: the embedding before all layers, norm and head behind them."""
    parts = name.split(".")
    if parts[0] == "layers":
        return int(parts[1])
    return -1 if parts[0] == "embed_tokens" else math.inf


def check_space(run: Path, need: int) -> None:
    free = shutil.disk_usage(run).free
    if free < need:
        raise place.PlaceError(
            f"{run}: an export needs {number_formats.size(need)} (until it is whole, an earlier one stays), and "
            f"the disk has {number_formats.size(free)} free; make room, or set DTYPE=bfloat16 for half the size"
        )


def write_beside(
    folder: Path,
    found: load_run.Found,
    paths: RunPaths,
    vocabulary: Vocabulary,
    tokenizer: bytes,
    shapes: weight_files.Shapes,
) -> None:
    """All files but the weights."""
    c, step = found.config, found.step
    template, ends = chat_of(vocabulary)
    norm_eps = NORM_EPS if found.norm_eps is None else found.norm_eps
    for name, content in (
        ("config.json", files.config_json(c, vocabulary, c.dtype, norm_eps)),
        ("generation_config.json", files.generation_config(vocabulary, ends)),
        ("tokenizer_config.json", files.tokenizer_config(c, vocabulary, template)),
    ):
        (folder / name).write_text(
            json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    (folder / "tokenizer.json").write_bytes(tokenizer)
    facts: dict[str, Any] = {"run": c.run_name, "step": step}
    if ends:
        facts["stop_token"] = vocabulary.tokenizer.id_to_token(ends[0])
    place.write_facts(folder, facts)
    run, energy = recorded(paths)
    (folder / "README.md").write_text(
        card.card(
            card.Known(
                c,
                shapes,
                c.dtype,
                step,
                found.facts,
                run,
                energy,
                card.results_of(paths.folder / "eval", step),
                template is not None,
            )
        ),
        encoding="utf-8",
    )


def chat_of(vocabulary: Vocabulary) -> tuple[str | None, list[int]]:
    """(the template of a chat, ids that end an answer) where the vocabulary has the tokens for it; else (None, [])."""
    if not chat_format.special_tokens(vocabulary):
        return None, []
    return chat_format.format_of(vocabulary).template, [chat_format.end_of_message(vocabulary)]


def recorded(paths: RunPaths) -> tuple[Run | None, Energy | None]:
    """The run's record, and the energy of its GPUs; None where there is none, or it cannot be read, which is said."""
    try:
        run = read_run(paths.folder)
    except RunError as error:
        complain(f"the model card is without the record of the run: {error}")
        return None, None
    try:
        return run, add_energy(run).energy
    except (OSError, ValueError) as error:
        complain(f"the model card is without energy: {error}")
        return run, None


def tell(found: load_run.Found, target: Path, replaces: bool, vocabulary: Vocabulary) -> None:
    """What was written, and how it is loaded."""
    rows = [(path.name, f"{path.stat().st_size:,}") for path in sorted(target.iterdir())]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    say("\n".join(f"  {name:<{widths[0]}}  {size:>{widths[1]}}" for name, size in rows))
    say(
        "read back: every weight is the checkpoint's"
        + (", rounded to bfloat16" if found.config.dtype == "bfloat16" else " to the bit")
        + ("; this replaces an export" if replaces else "")
    )
    where = from_root(target)
    say(
        f"\n{where}\n  check it:     (cd {where} && sha256sum -c SHA256SUMS)"
        f"\n  in Python:    model = transformers.AutoModelForCausalLM.from_pretrained({str(where)!r})"
        f"\n                tokenizer = transformers.AutoTokenizer.from_pretrained({str(where)!r})"
        f"\n  train on:     make train PRESET={found.config.preset} DATA=more.txt INIT_FROM={where}"
    )


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
