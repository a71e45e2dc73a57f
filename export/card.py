"""README.md of an export: a model card, from what the files of the run say.

    settings, manifest, metrics.jsonl, GPU samples, eval/*.json -> Markdown with the Hub's YAML header

What no file says is n/a. The license is the publisher's choice. A card is made to be published, so it
contains no host name, path or address of this machine.
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.energy.join import add_energy
from analysis.energy.result import Energy
from analysis.runs import Run, RunError, read_run
from export.weight_files import Shapes
from hardware.flops import flops_per_token
from record import number_formats
from record.metrics import duration, figures
from record.run_paths import RunPaths
from settings.config import SETTINGS, Config, is_default
from settings.declare import FREE, format_value
from settings.json_file import read_object
from settings.terminal import complain
from train.data.data_paths import share_of, source_of
from train.data.sources.source import CorpusError

NA = "n/a"
NOT_IN_LAYERS = ("embed_tokens.weight", "lm_head.weight")
MEASURED = ("val_bpb", "val_loss", "scored_tokens", "sources", "core", "choice", "written")


@dataclasses.dataclass(frozen=True)
class About:
    """What a card is written from.

    Attributes:
        facts: the run's config.json, and "checkpoint" with the manifest.
        shapes: of all weights.
        run: the record, None if there is none.
        energy: of the GPUs, None if they were not sampled.
        results: what evaluations of this step measured.
    """

    config: Config
    facts: Mapping[str, Any]
    shapes: Shapes
    run: Run | None
    energy: Energy | None
    results: Sequence[Mapping[str, Any]]

    @property
    def step(self) -> int:
        return int(self.facts["checkpoint"]["step"])

    @property
    def tokens(self) -> int | None:
        """Number of tokens trained on."""
        tokens: int | None = self.facts["checkpoint"].get("tokens")
        return tokens

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes.values()))


def collect(config: Config, paths: RunPaths, facts: Mapping[str, Any], shapes: Shapes) -> About:
    """Read the record and the evaluations of a run. What cannot be read is reported and left out."""
    run = None
    energy = None
    try:
        run = read_run(paths.folder)
        energy = add_energy(run).energy
    except (RunError, OSError, ValueError) as error:
        complain(f"The model card is without the record of the run: {error}")
    results = read_results(paths.folder / "eval", facts["checkpoint"]["step"])
    return About(config, facts, shapes, run, energy, results)


def read_results(folder: Path, step: int) -> list[dict[str, Any]]:
    """Return the evaluations of a step in eval/, in the order of their file names."""
    results = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            results.append(read_object(path))
    return [result for result in results if result.get("step") == step]


# ---- Cards


def pretrained(about: About, has_template: bool) -> str:
    """Return the card of a pretrained run."""
    config = about.config
    kind = "qwen3" if config.qk_norm else "llama"
    datasets = [repository_of(config, name) for name in config.mixture]
    head = {"tags": [kind, "pytorch"], "datasets": [name for name in datasets if name]}
    note = "Every text that the model was trained on begins with `bos_token`. A prompt should too."
    if has_template:
        note += "\nThe chat template is only of use if the model was trained on conversations."
    return f"""{header(config, head)}
A language model with {count(about.parameters)} parameters in the shape of {kind.capitalize()}, trained
on {count(about.tokens)} tokens: step {about.step:,} of the run `{config.run_name}`.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER")
inputs = tokenizer(tokenizer.bos_token + "The", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```

{note}

## Training

{table(("", ""), [*model_rows(about), *training_rows(about)])}

## Data

{table(("source", "dataset", "share", "tokens"), data_rows(about))}

{evaluation_section(about)}
## Limits

- It sees {config.seq_len:,} tokens. Positions beyond that were never trained.
- It repeats what its data say, including what is wrong or offensive.
- License: {NA}. Choose one that the data sets allow, and add `license:` to the header of this file.
- Languages, intended use, tests for bias: {NA}.

{settings_section(config)}"""


def tuned(about: About, repository: str) -> str:
    """Return the card of a fine-tuned run.

    Args:
        repository: of MODEL on the Hub, "" if it is a folder or a run.
    """
    config = about.config
    base = repository or Path(config.model).name
    return f"""{header(config, {"tags": ["pytorch"], "base_model": repository})}
{base}, fine-tuned on conversations: step {about.step:,} of the run `{config.run_name}`.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER")
messages = [{{"role": "user", "content": "Hello"}}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=200)[0]))
```

## Training

{table(("", ""), [("parameters", f"{about.parameters:,}"), *training_rows(about)])}

{evaluation_section(about)}
## Limits

- License: {NA}. Choose one that those of {base} and of the data allow, and add `license:` to the
  header of this file.
- Languages, intended use, tests for bias: {NA}.

{settings_section(config)}"""


def header(config: Config, more: Mapping[str, Any]) -> str:
    """Return the YAML that the Hub reads, and the title. Values are JSON, which is YAML."""
    values = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "model_name": config.run_name,
        **more,
    }
    lines = [f"{name}: {json.dumps(value)}" for name, value in values.items() if value]
    return "\n".join(["---", *lines, "---", "", f"# {config.run_name}", ""])


def settings_section(config: Config) -> str:
    lines = "\n".join(changed_settings(config))
    return f"""## Settings

Settings that decide what was computed and differ from their defaults, without paths.

```
{lines}
```

`sha256sum -c SHA256SUMS` checks all files.
"""


# ---- Tables


def model_rows(about: About) -> list[tuple[str, str]]:
    """Return what the model is, and what computing it took."""
    config = about.config
    matrices = config.padded_vocab_size * config.n_embd
    for name, shape in about.shapes.items():
        if len(shape) == 2 and not name.endswith(NOT_IN_LAYERS):
            matrices += math.prod(shape)
    per_token = flops_per_token(matrices, config.n_layer, config.n_embd, config.seq_len)
    compute = NA
    if about.tokens:
        compute = f"{about.tokens * per_token:.3g} FLOPs (6 N + 12 L d T per token)"
    return [
        ("parameters", f"{about.parameters:,}"),
        ("layers", f"{config.n_layer} of width {config.n_embd}"),
        ("context length", f"{config.seq_len:,} tokens"),
        ("initial weights", initial_weights(about)),
        ("compute", compute),
    ]


def training_rows(about: About) -> list[tuple[str, str]]:
    """Return how a run was trained."""
    config = about.config
    attempts = about.facts["attempts"]
    machines = [f"{one.get('world_size', NA)} x {one.get('device', NA)}" for one in attempts]
    commits = []
    for attempt in attempts:
        changes = " and uncommitted changes" if attempt.get("git_dirty") else ""
        if attempt.get("git"):
            commits.append(attempt["git"][:12] + changes)
    if config.replicas > 1:
        machines.append(f"{config.replicas} sites (DiLoCo, weights of the first)")
    time = NA
    if about.run and about.run.timeline and last_step(about.run) == about.step:
        seconds = sum(about.run.timeline.seconds().values())
        time = f"{duration(seconds)}, including all interruptions"
    return [
        ("steps", f"{about.step:,} of {config.last_step:,}, {config.batch_tokens:,} tokens each"),
        ("tokens", count(about.tokens)),
        ("optimizer", f"{config.optimizer}, learning rate {config.learning_rate:g}"),
        ("schedule", f"{config.lr_schedule} to {config.min_learning_rate:g}"),
        ("precision", f"{config.dtype}; weights and optimizer state in float32"),
        ("hardware", join(machines)),
        ("time", time),
        ("GPU energy", describe_energy(about)),
        ("code", join(commits)),
    ]


def initial_weights(about: About) -> str:
    """Say from what training started: random weights, or files by their hashes."""
    if not about.config.init_from:
        return "random"
    for attempt in about.facts["attempts"]:
        if hashes := attempt.get("init_from"):
            return join(f"{name} of sha256 {digest[:16]}" for name, digest in hashes.items())
    return NA


def last_step(run: Run) -> int:
    """Return the last step of the record. Its sums are of the model if they have the same step."""
    return int(run.columns["step"][-1])


def describe_energy(about: About) -> str:
    """Return what the GPU samples of the run say."""
    if not (about.run and about.energy and about.energy.coverage):
        return NA
    step = last_step(about.run)
    until = "" if step == about.step else f" up to step {step:,}"
    coverage = about.energy.coverage
    return f"{figures(about.energy.kwh)} kWh{until}; samples cover {coverage:.1%} of the GPU time"


def data_rows(about: About) -> Iterator[tuple[str, ...]]:
    """Yield the sources, with what the checkpoint counted, or else the shares of DATA_MIX."""
    measured = about.facts["checkpoint"].get("data", {}).get("shares") or {}
    for name in about.config.mixture:
        source = measured.get(name, {})
        share = source.get("share", share_of(about.config, name))
        tokens = source.get("tokens", round(share * (about.tokens or 0)))
        yield name, repository_of(about.config, name) or NA, f"{share:.2%}", count(tokens)


def repository_of(config: Config, name: str) -> str:
    """Return the Hub repository of a source, "" if it has none or is no longer declared."""
    try:
        return source_of(config, name).repository
    except CorpusError:
        return ""


def evaluation_section(about: About) -> str:
    """Return the section on evaluations: those of the run itself, then those of `make eval`."""
    rows: list[tuple[str, str]] = []
    for evaluation in about.run.evals if about.run else ():
        if evaluation["step"] == about.step:
            rows = list(flatten(evaluation))  # the last one is of all held-out text
    for evaluation in about.results:
        rows += flatten(evaluation)
    if not rows:
        return f"## Evaluation\n\n{NA}: neither the run nor `make eval` evaluated this step.\n"
    return f"## Evaluation\n\nOf this step.\n\n{table(('result', 'value'), rows)}\n"


def flatten(evaluation: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the numbers of an evaluation that are results, by the path of their keys."""
    for key in MEASURED:
        yield from flatten_value(key, evaluation.get(key))


def flatten_value(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value.get("asked") != 0:
        for key, inner in value.items():
            yield from flatten_value(f"{path} {key}", inner)
    elif isinstance(value, float) and math.isfinite(value):
        yield path, f"{value:.4f}"
    elif type(value) is int:  # no bool
        yield path, f"{value:,}"


# ---- Words


def changed_settings(config: Config) -> list[str]:
    """Return NAME=value of settings that shape a run and are not the default, without secrets."""
    values = config.values()
    lines = []
    for name, setting in SETTINGS.items():
        text = format_value(values[name])
        is_public = setting.resume != FREE and not setting.secret and not is_path(name, text)
        if is_public and not is_default(name, values):
            lines.append(f"{name}={text}")
    return lines


def is_path(name: str, value: str) -> bool:
    """Tell whether the value of a setting may be a place on this machine."""
    if name in ("DATA", "EVAL_DATA", "MID_DATA"):
        return not value.startswith("hf:")
    is_file = value.endswith(".json") or value.startswith((".", "/"))
    return name in ("INIT_FROM", "MODEL") or (name == "TOKENIZER" and is_file)


def join(words: Iterable[str]) -> str:
    """Return the distinct words in their order, n/a if there are none."""
    return ", then ".join(dict.fromkeys(words)) or NA


def count(number: int | None) -> str:
    """Return 1.34B for 1,340,000,000."""
    return NA if number is None else number_formats.count(number)


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = []
    for row in (names, ["---"] * len(names), *rows):
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
