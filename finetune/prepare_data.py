"""DATA for MODEL: examples to train on, a fixed subset to evaluate with, and what is to be said of both.

`python -m finetune.prepare_data` prepares DATA (MODEL, SEQ_LEN), says what became of its rows, and shows one example. With
`before-training` behind it, as train/start_node.py has it, it leaves both to the training, whose log they belong to.

Exit codes: 0; 64 a setting is bad; 78 data or tokenizer are bad; 130 stopped by Ctrl-C.
"""

import dataclasses
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from finetune import exercises, hf_model, model_folder, subset, template, tuning_settings
from finetune.batches import Batches
from finetune.preview import preview
from finetune.several import examples_of
from finetune.store import Examples
from finetune.template import Template
from record import number_formats
from settings import ROOT, SettingsError, explain_error, tuning_rules
from settings.config import Config
from settings.resolve import set_target, take_words
from settings.terminal import complain
from train.data.data_paths import data_dir
from train.data.sources.source import CorpusError
from train.data.tokenizer import TokenizerError
from train.distributed.world import report_exit
from train.model.hf_import import ForeignError

BAD_SETTING, BAD_DATA, STOPPED = 64, 78, 130
BEFORE_TRAINING = "before-training"
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run trains on and is evaluated with: indices into the examples of DATA, and into those of `evaluation`,
    which are the same or EVAL_DATA's. lines: what is to be said of it."""

    c: Config
    made_for: Template
    examples: Examples
    train: np.ndarray
    evaluation: Examples
    held_out: np.ndarray
    lines: tuple[str, ...]

    def batches(self, ranks: int, epochs: int | None = None) -> Batches:
        """Steps of training: BATCH_TOKENS of positions each, MICRO_BATCH_SIZE windows at once."""
        return Batches(
            self.examples,
            self.train,
            self.c.seq_len,
            self.c.batch_windows,
            self.c.micro_batch(ranks),
            self.c.seed,
            epochs,
        )

    def evaluation_batches(self, ranks: int) -> Batches:
        """Steps of evaluation: a micro-batch of each rank, always the same; after the last one all are blank."""
        size = self.c.micro_batch(ranks)
        return Batches(
            self.evaluation,
            self.held_out,
            self.c.seq_len,
            size * ranks,
            size,
            self.c.seed,
            epochs=1,
            shuffled=False,
        )

    def preview(self, colour: bool) -> str:
        """The first example that is trained on."""
        batches = self.batches(1)
        window = batches.window(0)
        shown = batches.arrays([window])
        part = slice(int(shown.bounds[0]), int(shown.bounds[1]))
        return preview(
            shown.tokens[0, part],
            shown.targets[0, part],
            self.made_for.decode,
            self.examples.place(int(self.train[window[0]])),
            colour,
        )


def prepared(c: Config, folder: Path) -> Data:
    """DATA for the model of a folder. Raises SettingsError, CorpusError, TokenizerError."""
    length = hf_model.longest(folder)
    if length and c.seq_len > length:
        raise SettingsError(
            [
                f"SEQ_LEN={c.seq_len}: MODEL={c.model} was made for {length} tokens "
                f"(max_position_embeddings); set SEQ_LEN={length} or less"
            ]
        )
    return prepare(c, template.find(folder, c.model))


def prepare(c: Config, made_for: Template) -> Data:
    """Make or find the examples of DATA, and of EVAL_DATA where it is set. Raises SettingsError, CorpusError."""
    if not c.data:
        raise SettingsError(
            [
                "DATA is not set; give conversations to train on, for example DATA=chats.jsonl; "
                "docs/finetune.md lists what is read"
            ]
        )
    folder = data_dir(c) / "finetune"
    examples = evaluation = examples_of(c.data, made_for, c.seq_len, folder, c.hf_token)
    lines = [*made_for.remarks, *(f"DATA: {line}" for line in examples.report)]
    hashes = examples.index["hash"]
    if c.eval_data:
        sources = exercises.data_of(c, "EVAL_DATA")
        evaluation = examples_of(sources, made_for, c.seq_len, folder, c.hf_token, "EVAL_DATA")
        lines += [f"EVAL_DATA: {line}" for line in evaluation.report]
        wanted = tuning_rules.HELD_OUT_CONVERSATIONS
        held_out = subset.chosen(evaluation.index["hash"], c.seed, wanted)
        parts = subset.split(hashes, c.seed, 0, beside=evaluation.index["hash"])
    else:
        parts = subset.split(hashes, c.seed, tuning_rules.HELD_OUT_CONVERSATIONS)
        held_out = parts.held_out
    if not len(parts.train):
        raise CorpusError(
            f"DATA={c.data}: no conversation is left to train on, since all of it is in EVAL_DATA="
            f"{c.eval_data} as well; take other data"
        )
    data = Data(c, made_for, examples, parts.train, evaluation, held_out, ())
    return dataclasses.replace(data, lines=(*lines, *summary(data, parts)))


def summary(data: Data, parts: subset.Split) -> list[str]:
    """What is trained on and evaluated with, in numbers."""
    c, batches, index = data.c, data.batches(1), data.examples.index
    same = len(index) - len(np.unique(index["hash"]))
    lines = [
        f"training: {len(data.train):,} examples, {number_formats.count(batches.scored.sum())} of "
        f"{number_formats.count(batches.packing.positions.sum())} tokens scored; an epoch is {batches.packing.windows:,} windows "
        f"of {c.seq_len} tokens, {batches.filled:.1%} full, or {batches.packing.windows / c.batch_windows:,.1f} "
        "steps"
    ]
    if same:
        lines.append(
            f"{same:,} examples say the same as another one, and are trained on as often as they are there"
        )
    scored = int(data.evaluation.index["scored"][data.held_out].sum())
    evaluation = "none, because DATA has fewer than 10 different conversations"
    if len(data.held_out):
        origin = "EVAL_DATA" if c.eval_data else "DATA"
        evaluation = f"{len(data.held_out):,} conversations of {origin}, {scored:,} scored tokens"
    lines.append(f"evaluation: {evaluation}")
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
        c = tuning_settings.load_settings()
        was_here, folder = model_folder.is_here(c), model_folder.bring(c)
        if BEFORE_TRAINING in argv and not was_here:
            code, why = planned()
            if code:
                report_exit(code, why=why)
                return code
        data = prepared(c, folder)
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
