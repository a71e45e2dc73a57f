"""DATA for MODEL: examples to train on, those to evaluate with, and a report on both.

`python -m finetune.prepare_data` prepares DATA (MODEL, SEQ_LEN), prints what became of its rows, and
shows one example. With `before-training`, as train/start_node.py calls it, the training prints these.

Exit codes: 0; 64 a bad setting; 78 bad data, model or tokenizer; 130 stopped by Ctrl-C.
"""

import dataclasses
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from finetune import exercises, hf_model, model_folder, tuning_settings
from finetune.batches import Batches
from finetune.chat_template import ChatTemplate
from finetune.examples import Examples, Split, choose_examples, examples_of, split
from finetune.preview import preview
from record.exit_codes import BAD_DATA, BAD_SETTING
from record.number_formats import count
from record.run_paths import RunPaths, list_checkpoints, name_checkpoint
from settings import ROOT, SettingsError, explain_error, tuning_rules
from settings.config import Config
from settings.resolve import set_target, take_words
from settings.terminal import complain
from train.checkpoint.manifest import CheckpointError, load_manifest
from train.data.data_paths import data_dir
from train.data.sources.source import CorpusError
from train.data.tokenizer import TokenizerError
from train.distributed.world import report_exit
from train.model.hf_import import ForeignError

STOPPED = 130
BEFORE_TRAINING = "before-training"


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run trains on and is evaluated with.

    Attributes:
        examples: of DATA.
        train: (n,) int64, numbers of the examples to train on.
        evaluation: `examples`, or those of EVAL_DATA.
        held_out: (m,) int64, numbers of those to evaluate with.
        lines: what became of the rows, and what is trained on and evaluated with.
    """

    config: Config
    template: ChatTemplate
    examples: Examples
    train: np.ndarray
    evaluation: Examples
    held_out: np.ndarray
    lines: list[str]

    def batches(self, ranks: int, epochs: int | None = None) -> Batches:
        """Return the steps of training: BATCH_TOKENS each, MICRO_BATCH_SIZE windows at once."""
        config = self.config
        return Batches(
            self.examples,
            self.train,
            config.seq_len,
            config.batch_windows,
            config.micro_batch(ranks),
            config.seed,
            epochs,
        )

    def evaluation_batches(self, ranks: int) -> Batches:
        """Return the steps of an evaluation: a micro-batch of each rank, always the same."""
        config = self.config
        size = config.micro_batch(ranks)
        return Batches(
            self.evaluation,
            self.held_out,
            config.seq_len,
            size * ranks,
            size,
            config.seed,
            epochs=1,
            shuffled=False,
        )

    def preview(self, color: bool) -> str:
        """Return the first example that is trained on, as text."""
        number = int(self.train[self.batches(1).window(0)[0]])
        ids, scored = self.examples.example(number)
        return preview(ids, scored, self.template.decode, self.examples.place(number), color)


def prepared(config: Config, folder: Path) -> Data:
    """Return DATA for the model of a folder. Raises SettingsError, CorpusError, TokenizerError."""
    length = hf_model.longest(folder)
    if length and config.seq_len > length:
        raise SettingsError(
            [
                f"SEQ_LEN={config.seq_len}: MODEL={config.model} was made for {length} tokens "
                f"(max_position_embeddings). Set SEQ_LEN={length} or less."
            ]
        )
    return prepare(config, ChatTemplate(folder, config.stop_token, config.model))


def prepare(config: Config, template: ChatTemplate) -> Data:
    """Tokenize DATA, and EVAL_DATA if it is set, or find them. Raises SettingsError, CorpusError."""
    if not config.data:
        raise SettingsError(
            [
                "DATA is not set. Give conversations to train on, for example DATA=chats.jsonl; "
                "docs/finetune.md lists what is read."
            ]
        )

    lines = list(template.remarks)

    def read(data: str, setting: str, stored_key: str = "") -> Examples:
        folder = data_dir(config) / "finetune"
        examples = examples_of(
            data, template, config.seq_len, folder, config.hf_token, setting, stored_key
        )
        lines.extend(f"{setting}: {line}" for line in examples.report)
        return examples

    wanted = tuning_rules.HELD_OUT_CONVERSATIONS
    examples = evaluation = read(config.data, "DATA", find_stored_key(config))
    if config.eval_data:
        evaluation = read(exercises.data_of(config, "EVAL_DATA"), "EVAL_DATA")
        parts = split(examples, config.seed, 0, beside=evaluation)
        parts = parts._replace(held_out=choose_examples(evaluation.index, config.seed, wanted))
    else:
        parts = split(examples, config.seed, wanted)
    if not len(parts.train):
        raise CorpusError(
            f"DATA={config.data}: no conversation is left to train on, since all of it is in "
            f"EVAL_DATA={config.eval_data} as well. Give other data."
        )
    data = Data(config, template, examples, parts.train, evaluation, parts.held_out, lines)
    lines += describe(data, parts)
    return data


def find_stored_key(config: Config) -> str:
    """Return how the key of the examples begins that the run was trained on so far, "" for none."""
    checkpoints = RunPaths.of_node(config, ROOT).checkpoints
    steps = list_checkpoints(checkpoints)
    if not steps:
        return ""
    try:
        manifest = load_manifest(checkpoints / name_checkpoint(steps[-1]))
    except CheckpointError:  # resuming reports it
        return ""
    return str(manifest["data"]["fingerprint"]).partition("-")[0]


def describe(data: Data, parts: Split) -> list[str]:
    """Return what is trained on and evaluated with, as lines."""
    config = data.config
    batches = data.batches(1)
    packing = batches.packing
    lines = [
        f"training: {len(data.train):,} examples, {count(batches.scored.sum())} of "
        f"{count(packing.positions.sum())} tokens scored; an epoch is {packing.windows:,} windows of "
        f"{config.seq_len} tokens, {batches.filled:.1%} full, or "
        f"{packing.windows / config.batch_windows:,.1f} steps"
    ]
    source = "EVAL_DATA" if config.eval_data else "DATA"
    held_out = data.evaluation.index[data.held_out]
    if len(held_out):
        conversations = len(np.unique(held_out["hash"]))
        tokens = int(held_out["scored"].sum())
        lines.append(
            f"evaluation: {conversations:,} conversations of {source}, {tokens:,} scored tokens"
        )
    else:
        lines.append("evaluation: none, because DATA has fewer than 10 different conversations")
    if parts.copies:
        lines.append(f"{parts.copies:,} copies of what is evaluated with are left out of training")
    return lines


def planned() -> tuple[int, str]:
    """The plan of what could not be planned before MODEL was here: the exit code, and why it must not begin."""
    done = subprocess.run(
        [sys.executable, "-m", "doctor.before_run", "finetune"],
        cwd=ROOT,
        check=False,
        text=True,
        stderr=subprocess.PIPE,
    )
    sys.stderr.write(done.stderr)
    return done.returncode if done.returncode in (0, BAD_SETTING, BAD_DATA) else 1, " ".join(
        done.stderr.split()
    )


def main(argv: Sequence[str] = ()) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        take_words(argv, (BEFORE_TRAINING,))
        config = tuning_settings.load_settings()
        was_here, folder = model_folder.is_here(config), model_folder.bring(config)
        if BEFORE_TRAINING in argv and not was_here:
            code, why = planned()
            if code:
                report_exit(code, why=why)
                return code
        data = prepared(config, folder)
        if BEFORE_TRAINING not in argv:
            sys.stdout.write("\n".join([*data.lines, "", data.preview(sys.stdout.isatty())]) + "\n")
    except (SettingsError, CorpusError, TokenizerError, ForeignError) as error:
        why = explain_error(error)
        complain(why)
        code = BAD_SETTING if isinstance(error, SettingsError) else BAD_DATA
        report_exit(code, why=why)  # for the other nodes, which train/start_node.py tells
        return code
    except OSError as error:
        why = (
            f"{error.filename or 'a disk of DATA_DIR or RUNS_DIR'}: cannot be read or written "
            f"({error.strerror or error}); make room, mend its permissions, or choose another DATA_DIR or RUNS_DIR"
        )
        complain(why)
        report_exit(BAD_DATA, why=why)
        return BAD_DATA
    except KeyboardInterrupt:
        complain("stopped; what was prepared before is as it was")
        return STOPPED
    return 0


if __name__ == "__main__":
    set_target("finetune")
    sys.exit(main(sys.argv[1:]))
