"""README.md of an export: a model card, of what the run's own files say and of nothing else.

    settings, manifest, record, samples of its GPUs, eval/*.json -> text with a YAML head that the hub reads

What no file tells is n/a, and the licence is for whoever publishes to choose. A card is made to be published: it has
no name of a host, no path and no address of this machine.
"""

import dataclasses
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.energy.result import Energy
from analysis.runs import Run
from export.weight_files import Shapes
from hardware.flops import flops_per_token
from record import number_formats
from record.metrics import duration, figures
from settings.config import SETTINGS, Config, is_default
from settings.declare import FREE, format_value
from train.data.data_paths import share_of, source_of
from train.data.sources.source import CorpusError

NA = "n/a"
HEADS = ("embed_tokens.weight", "lm_head.weight")


@dataclasses.dataclass(frozen=True)
class Known:
    """What a card is made of. facts: as train.generate.load_run has them; run, energy: None where there is no record, or no
    sample; results: file name -> what an evaluation wrote there; chat: whether the tokenizer has a template."""

    config: Config
    shapes: Shapes
    dtype: str
    step: int
    facts: Mapping[str, Any]
    run: Run | None
    energy: Energy | None
    results: Mapping[str, Any]
    chat: bool

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def tokens(self) -> int | None:
        value = self.facts["checkpoint"].get("tokens")
        return value if isinstance(value, int) else None

    @property
    def flops(self) -> float | None:
        """Of all tokens: 6 N + 12 L d T for each, as the trainer counts MFU, its padding of the head included."""
        c = self.config
        products = (
            sum(
                math.prod(shape)
                for name, shape in self.shapes.items()
                if len(shape) == 2 and name not in HEADS
            )
            + c.padded_vocab_size * c.n_embd
        )
        return self.tokens and self.tokens * flops_per_token(
            products, c.n_layer, c.n_embd, c.seq_len
        )


def card(k: Known) -> str:
    """The whole file."""
    c = k.config
    kind = "Qwen3" if c.qk_norm else "Llama"
    about = (
        f"A language model of {spelled(k.parameters)} parameters in the shape of {kind}, trained on "
        f"{spelled(k.tokens)} tokens: step {k.step:,} of the run `{c.run_name}`."
    )
    return "\n".join(
        [
            *head(k),
            f"# {c.run_name}",
            "",
            about,
            "",
            *use(k),
            "## Training",
            "",
            *table(("what", "value"), training(k)),
            "",
            "## Data",
            "",
            *data(k),
            "",
            "## Evaluation",
            "",
            *evaluation(k),
            "",
            "## Limits",
            "",
            *limits(k),
            "",
            "## Settings",
            "",
            "Those that decide what was computed and are not the default, without paths, as `make train` takes them.",
            "",
            "```",
            *settings(c),
            "```",
            "",
            "## Files",
            "",
            "`sha256sum -c SHA256SUMS` checks all of them. Weights were compared, one by one, with those of the checkpoint"
            + (" rounded to bfloat16" if k.dtype == "bfloat16" else "")
            + " before this folder got its name.",
            "",
        ]
    )


def head(k: Known) -> list[str]:
    """The YAML that the hub reads. Values are JSON, which is YAML."""
    repositories = [
        repository for name in k.config.mixture if (repository := repository_of(k.config, name))
    ]
    kind = "qwen3" if k.config.qk_norm else "llama"
    return [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        f"model_name: {json.dumps(k.config.run_name)}",
        f"tags: {json.dumps([kind, 'pytorch'])}",
        *([f"datasets: {json.dumps(repositories)}"] if repositories else []),
        "---",
        "",
    ]


def repository_of(c: Config, name: str) -> str:
    """Of a source on the hub; "" of any other, and of one that is not declared any more."""
    try:
        return source_of(c, name).repository
    except CorpusError:
        return ""


def use(k: Known) -> list[str]:
    """How to load it."""
    lines = [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
        'inputs = tokenizer(tokenizer.bos_token + "The", return_tensors="pt", return_token_type_ids=False)',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))",
        "```",
        "",
        "Every text that it was trained on begins with `bos_token`; a prompt should too.",
    ]
    if k.chat:
        lines += [
            "The tokenizer has a chat template; it is of use only if the model was trained on chats."
        ]
    return [*lines, ""]


# ---------------------------------------------------------------------------------------------------
# Training and data
# ---------------------------------------------------------------------------------------------------


def training(k: Known) -> list[tuple[str, str]]:
    """What is told of the training, by line."""
    c, attempts = k.config, list(k.facts["attempts"])
    of = distinct(f"{a.get('world_size', NA)} x {a.get('device', NA)}" for a in attempts)
    code = distinct(
        str(a["git"])[:12] + (" and changes that are in no commit" if a.get("git_dirty") else "")
        for a in attempts
        if a.get("git")
    )
    sites = (
        f", {c.replicas} sites that exchange every {c.sync_every} steps (DiLoCo); weights of the first"
        if c.replicas > 1
        else ""
    )
    return [
        ("parameters", f"{k.parameters:,}"),
        (
            "shape",
            f"{c.n_layer} layers, width {c.n_embd}, {c.n_head} heads of {c.head_dim} ({c.n_kv_head} for keys and "
            f"values), SwiGLU of {c.mlp_dim}, {'tied' if c.tie_embeddings else 'untied'} head"
            + (", QK-norm" if c.qk_norm else ""),
        ),
        ("context length", f"{c.seq_len:,} tokens"),
        ("vocabulary", f"{c.vocab_size:,} entries"),
        ("started from", started_from(k)),
        ("steps", f"{k.step:,} of {c.last_step:,}, {c.batch_tokens:,} tokens each"),
        ("tokens", spelled(k.tokens)),
        ("computation", f"{k.flops:.3g} FLOPs (6 N + 12 L d T a token)" if k.flops else NA),
        (
            "optimizer",
            f"{c.optimizer}, {rates(k)}, weight decay {format_value(c.weight_decay)}",
        ),
        ("types", f"products in {c.dtype}, weights and moments in float32; exported in {k.dtype}"),
        ("hardware", ", then ".join(of) + sites if of else NA),
        (
            "time",
            duration(sum(k.run.timeline.seconds().values())) + ", all interruptions included"
            if k.run and k.run.timeline and at_end(k)
            else NA,
        ),
        ("energy of the GPUs", energy(k)),
        ("code", ", then ".join(code) or NA),
        (
            "torch",
            ", then ".join(distinct(str(a["torch"]) for a in attempts if a.get("torch"))) or NA,
        ),
    ]


def rates(k: Known) -> str:
    """The schedule of the learning rate, and how far the exported step is on it."""
    c = k.config
    words = f"{c.lr_schedule} from {c.learning_rate:g} to {c.min_learning_rate:g}"
    horizon = -(-c.train_tokens // c.batch_tokens)
    if k.step >= horizon:
        return words
    words += f" over {horizon:,} steps, of which it made {k.step:,}"
    if k.run and at_end(k) and math.isfinite(last := float(k.run.columns["lr"][-1])):
        words += f" (last rate {last:.3g})"
    return words


def started_from(k: Known) -> str:
    """Random weights, or files by their hash."""
    if not k.config.init_from:
        return "random weights"
    hashes = next((a["init_from"] for a in k.facts["attempts"] if a.get("init_from")), None)
    files = ", ".join(f"{name} of sha256 {digest[:16]}" for name, digest in (hashes or {}).items())
    return f"weights of others: {files or NA}"


def at_end(k: Known) -> bool:
    """Whether the record ends with the step that is exported: sums over all of it are of this model."""
    return k.run is not None and int(k.run.columns["step"][-1]) == k.step


def energy(k: Known) -> str:
    if k.energy is None or k.run is None or not k.energy.coverage:
        return NA
    upto = "" if at_end(k) else f", up to step {int(k.run.columns['step'][-1]):,}"
    return f"{figures(k.energy.kwh)} kWh{upto}; samples cover {100 * k.energy.coverage:.1f}% of the GPUs' time"


def data(k: Known) -> list[str]:
    """Sources and what of them was seen: as the checkpoint counted it, or else as DATA_MIX asks."""
    c, counted = k.config, k.facts["checkpoint"].get("data", {}).get("shares")
    rows = []
    for name in c.mixture:
        seen = (counted or {}).get(name, {})
        share, tokens = seen.get("share", share_of(c, name)), seen.get("tokens")
        if tokens is None and k.tokens is not None:
            tokens = round(share * k.tokens)
        epochs = seen.get("epochs")
        repository = repository_of(c, name)
        where = (
            f"[{repository}](https://huggingface.co/datasets/{repository})" if repository else NA
        )
        rows.append(
            (name, where, f"{100 * share:.2f}%", spelled(tokens), f"{epochs:.2f}" if epochs else NA)
        )
    how = (
        "Counted up to this step."
        if counted
        else "By the weights of DATA_MIX; the checkpoint has no count."
    )
    return [*table(("source", "data set", "share", "tokens", "epochs"), rows), "", how]


# ---------------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------------


def evaluation(k: Known) -> list[str]:
    """Held-out text by the record, and what `make eval` found of this step."""
    lines: list[str] = []
    done = [
        e
        for e in (k.run.evals if k.run else ())
        if e["step"] == k.step and e.get("val_loss") is not None
    ]
    if done:
        last = done[-1]  # the full set's, where there is one
        lines += [
            *table(
                ("held-out text", "value"),
                [
                    ("bits per byte", shown(last.get("val_bpb"))),
                    ("loss, nats a token", shown(last["val_loss"])),
                    ("tokens scored", shown(last.get("scored_tokens"))),
                ],
            ),
            "",
        ]
    for found in k.results.values():
        rows = results(found)
        if rows:
            lines += [
                f"By `make eval`, of this step{day_of(found)}:",
                "",
                *table(("result", "value"), rows),
                "",
            ]
    return lines[:-1] or [
        f"{NA}: neither the record nor `eval/` has an evaluation of step {k.step:,}."
    ]


def day_of(found: Mapping[str, Any]) -> str:
    """When it was measured: there may be several, of which make eval keeps all."""
    when: Any = found.get("time")
    return (
        time.strftime(", %Y-%m-%d %H:%M UTC", time.gmtime(when))
        if is_number(when) and 0 <= when < 2**40
        else ""
    )


def results(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what, value) of a step_N.json, as train.generate.eval_run writes it; nothing of how and where it was measured."""

    def of(where: Any, key: str) -> Any:
        value = where.get(key) if isinstance(where, Mapping) else None
        return value if isinstance(value, Mapping) or is_number(value) else None

    rows = [(words, of(found, key)) for key, words in VALIDATION.items()]
    sources = of(found, "sources") or {}
    if len(sources) > 1:
        rows += [
            (f"{words}, {name}", of(source, key))
            for name, source in sources.items()
            for key, words in VALIDATION.items()
        ]
    core = of(found, "core") or {}
    tasks = of(core, "tasks") or {}
    few = f", of {core['examples']} questions a task at most" if of(core, "examples") else ""
    count = of(core, "core_tasks")
    rows += [
        (f"CORE{few}", of(core, "core")),
        (f"mean of {count} tasks of CORE, which is not CORE{few}", of(core, "core_partial")),
        ("half of its 95 % interval", of(core, "core_margin")),
    ]
    rows += [
        (f"{label}, {of(task, 'shots')} shots, {words}", of(task, key))
        for label, task in tasks.items()
        for key, words in (("accuracy", "accuracy"), ("centred", "centered on guessing"))
    ]
    return [(words, shown(value)) for words, value in rows if is_number(value)]


VALIDATION = {
    "val_bpb": "held-out text, bits per byte",
    "val_loss": "held-out text, nats a token",
    "scored_tokens": "held-out text, tokens scored",
}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def results_of(folder: Path, step: int) -> dict[str, Any]:
    """File name -> content, of the evaluations in eval/ that say they are of this step; what cannot be read is no
    reason to export nothing."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and content.get("step") == step:
            found[path.name] = content
    return found


def limits(k: Known) -> list[str]:
    return [
        f"- It sees {k.config.seq_len:,} tokens; beyond that its positions were never trained.",
        "- It repeats what its data say, wrong or offensive as it may be. Nothing was done to keep it from that "
        "unless this card says so.",
        f"- License: {NA}; choose one that those of the data sets allow, and add `license:` to the head of this "
        "file.",
        f"- Languages, intended use, tests for bias: {NA}.",
    ]


# ---------------------------------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------------------------------


def settings(c: Config) -> list[str]:
    """NAME=value of what a resumed run may not change or would record, where it is not the default."""
    values = c.values()
    lines = []
    for name, setting in SETTINGS.items():
        text = format_value(values[name])
        is_telling = setting.resume != FREE and not setting.secret and not is_path(name, text)
        if is_telling and not is_default(name, values):
            lines.append(f"{name}={text}")
    return lines


def is_path(name: str, value: str) -> bool:
    """Whether a setting's value is a place of this machine; a repository of the hub is none."""
    if name == "DATA":
        return not value.startswith("hf:")
    is_file = value.endswith(".json") or value.startswith((".", "/"))
    return name == "INIT_FROM" or (name == "TOKENIZER" and is_file)


def distinct(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))


def spelled(number: int | None) -> str:
    """1.34B for 1,340,000,000."""
    return NA if number is None else number_formats.count(number)


def shown(value: Any) -> str:
    if value is None:
        return NA
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in (names, ["---"] * len(names), *cells)]
