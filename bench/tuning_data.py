"""What ours and TRL fine-tune in bench/tuning.py: a model and examples, and the table. It imports nothing of ours."""

import dataclasses
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WINDOW = 512  # tokens
ROWS = 4  # windows of a step
EXAMPLES = 48
LENGTHS = ("mixed", "equal")
CONTENDERS = ("ours", "TRL packed", "TRL padded")
HEADER_ROWS = (
    "| lengths of examples | real tokens/CPU s | TRL packed | TRL padded | MiB | TRL packed | TRL padded |",
    "|---|---|---|---|---|---|---|",
)


@dataclasses.dataclass(frozen=True)
class Example:
    """Token ids, and whether each is scored: a prompt is not, its reply is."""

    ids: list[int]
    scored: list[bool]


def make_examples(lengths: str) -> list[Example]:
    """Return examples of 16 to 512 tokens, most of them short; or all of 256. Half of each is its reply."""
    numbers = random.Random(1)
    examples = []
    for _ in range(EXAMPLES):
        size = 256
        if lengths == "mixed":
            size = min(WINDOW, max(16, round(numbers.lognormvariate(4.8, 0.8))))
        ids = [numbers.randrange(10, 16384) for _ in range(size)]
        examples.append(Example(ids, [i >= size // 2 for i in range(size)]))
    return examples


def save_model(folder: Path) -> None:
    """Write a Llama of 14M random weights, and a tokenizer, which TRL asks for but has nothing to read with."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=320,
        intermediate_size=896,
        num_hidden_layers=6,
        num_attention_heads=5,
        num_key_value_heads=5,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def report(seconds: float, examples: list[Example]) -> None:
    """Print CPU seconds, real tokens and the peak of resident memory, as a JSON line."""
    _, _, peak = Path("/proc/self/status").read_text().partition("VmHWM:")
    tokens = sum(len(example.ids) for example in examples)
    found = {"cpu_s": seconds, "tokens": tokens, "mib": int(peak.split()[0]) / 1024}
    sys.stdout.write(json.dumps(found) + "\n")


def row(found: dict[str, Any], spread: Callable[..., str]) -> str:
    """A line of the table; of TRL, how many times as fast ours is."""
    rates, peaks = found["tokens_per_cpu_s"], found["peak_mib"]
    cells = [found["lengths"], spread(rates["ours"], 0)]
    for name in CONTENDERS[1:]:
        ratios = [
            ours / theirs for ours, theirs in zip(rates["ours"], rates.get(name, []), strict=False)
        ]
        cells.append(spread(ratios, 2) if ratios else "n/a")
    cells += [f"{peaks[name]:.0f}" if name in peaks else "n/a" for name in CONTENDERS]
    return f"| {' | '.join(cells)} |"
