"""Settings of the training data: which text, how it is tokenized, and where the shards are."""

import re
from pathlib import PurePath

from settings.declare import (
    FROZEN,
    PRINTABLE,
    Format,
    PathText,
    Positive,
    Section,
    section,
    setting,
)
from settings.targets import COMPUTE, FINETUNE, PREPARE_DATA, PRETRAIN

LONGEST_NAME = 40  # of a source, which a run is named after


@section
class Corpus(Section):
    """Sources, tokenizer and shards."""

    USED_BY = PRETRAIN | PREPARE_DATA

    data: str = setting(
        "",
        "What to train on: a file or a folder, of text for pretraining and of conversations for "
        "fine-tuning. From the Hugging Face Hub: hf:OWNER/NAME:CONFIG:SPLIT. "
        "Default: the sources of DATA_MIX.",
        format=Format(PRINTABLE, "a path, or hf:OWNER/NAME"),
        example="novels.txt",
        resume=FROZEN,
        used_by=PRETRAIN | PREPARE_DATA | FINETUNE,
    )
    data_mix: str = setting(
        "python-stdlib:1",
        "Sources of training text and their integer weights, measured in tokens. "
        "Each source is declared in sources/NAME.toml or DATA_DIR/sources/NAME.toml.",
        format=Format(
            r"[a-z0-9-]+:[1-9][0-9]{0,5}(,[a-z0-9-]+:[1-9][0-9]{0,5})*",
            "SOURCE:WEIGHT with integer weights (shares of training tokens), and commas between several",
        ),
        resume=FROZEN,
    )
    data_dir: PathText = setting(
        "data",
        "Folder that holds token shards, downloads and models from the Hub.",
        used_by=COMPUTE | PREPARE_DATA | {"export", "bench"},
    )
    data_stream: str = setting(
        "auto",
        "Prepare shards during training (`1`) or before it (`0`). "
        "`auto` streams sources on the Hub whose shards are missing.",
        choices=("auto", "0", "1"),
        used_by=PRETRAIN,
    )
    data_cache_gb: Positive = setting(
        50,
        "Disk space for training shards while streaming. "
        "When full, shards already trained on are deleted.",
        unit="GB",
        needs="DATA_STREAM!=0",
        used_by=PRETRAIN,
    )
    doc_mask: bool = setting(
        False,
        "Restrict attention to the document of each token, in sequences that hold several.",
        resume=FROZEN,
        used_by=PRETRAIN | {"certify"},
    )
    tokenizer: str = setting(
        "train",
        "Tokenizer: train one on the mixture (`train`), "
        "or the path of a tokenizer.json, or a repository on the Hugging Face Hub.",
        resume=FROZEN,
        used_by=PRETRAIN | PREPARE_DATA | {"eval", "sample"},
    )

    @property
    def mixture(self) -> dict[str, int]:
        """Weight of each source."""
        parts = [part.split(":") for part in self.data_mix.split(",")]
        return {source: int(weight) for source, weight in parts}


def name_of_data(data: str) -> str:
    """Return the name of the source that DATA stands for: `tinystories` for hf:someone/TinyStories."""
    place = data.rpartition("#")[0] or data
    if place.startswith("hf:"):
        place = place.removeprefix("hf:").partition(":")[0]
    path = PurePath(place)
    while path.name.startswith(("*", "?", "[")):  # of texts/*.gz the folder
        path = path.parent
    stem = path.name.partition(".")[0]
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower())[:LONGEST_NAME]
    return name.strip("-") or "data"
