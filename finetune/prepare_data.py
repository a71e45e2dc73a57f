"""DATA for MODEL: examples to train on, those to evaluate with, and a report on both.

`python -m finetune.prepare_data` prepares DATA (MODEL, SEQ_LEN), prints what became of its rows, and
shows one example. With `before-training`, as train/start_node.py calls it, the training prints these.
With `count`, as plan/ calls it, nothing is downloaded: it prints what is chosen, and the steps, as JSON.

Exit codes: 0; 64 a bad setting; 78 bad data, model or tokenizer; 130 stopped by Ctrl-C.
"""

import dataclasses
import json
import logging
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finetune import hf_model, model_folder, tuning_settings
from finetune.batches import Batches
from finetune.chat_template import ChatTemplate
from finetune.conversations import source_of, sources_in
from finetune.examples import Examples, choose_examples, examples_of, split
from finetune.preview import preview
from record.exit_codes import BAD_DATA
from record.number_formats import count
from record.run_paths import RunPaths, list_checkpoints, name_checkpoint
from settings import ROOT, ExpectedError, SettingsError, explain_error, tuning_rules
from settings.config import Config
from settings.declare import format_value
from settings.resolve import find_fitted, set_target, take_words
from settings.terminal import complain
from train.checkpoint.manifest import CheckpointError, load_manifest
from train.data.data_paths import data_dir
from train.data.sources.source import CorpusError
from train.distributed.pod import exit_code_of
from train.distributed.world import report_exit

STOPPED = 130
BEFORE_TRAINING = "before-training"
COUNT = "count"


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run trains on and is evaluated with.

    Attributes:
        config: with the values that were chosen for model and DATA.
        examples: of DATA.
        train: (n,) int64, numbers of the examples to train on.
        evaluation: `examples`, or those of EVAL_DATA.
        held_out: (m,) int64, numbers of those to evaluate with.
        copies: how many examples are in neither, as copies of what is evaluated with.
        report: what became of the rows, as lines.
        chosen: settings that were chosen, as NAME=value.
    """

    config: Config
    template: ChatTemplate
    examples: Examples
    train: np.ndarray
    evaluation: Examples
    held_out: np.ndarray
    copies: int
    report: Sequence[str]
    chosen: Sequence[str] = ()

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

    @property
    def lines(self) -> list[str]:
        """What became of the rows, and what is trained on and evaluated with."""
        config = self.config
        batches = self.batches(1)
        packing = batches.packing
        steps = packing.windows / config.batch_windows
        lines = [
            *self.report,
            f"training: {len(self.train):,} examples, {count(batches.scored.sum())} of "
            f"{count(packing.positions.sum())} tokens scored; an epoch is {packing.windows:,} windows "
            f"of {config.seq_len} tokens, {batches.filled:.1%} full, or {steps:,.1f} steps",
        ]
        held_out = self.evaluation.index[self.held_out]
        if len(held_out):
            conversations = len(np.unique(held_out["hash"]))
            source = "EVAL_DATA" if config.eval_data else "DATA"
            lines.append(
                f"evaluation: {conversations:,} conversations of {source}, "
                f"{held_out['scored'].sum():,} scored tokens"
            )
        else:
            lines.append("evaluation: none, because DATA has fewer than 10 different conversations")
        if self.copies:
            lines.append(
                f"{self.copies:,} copies of what is evaluated with are left out of training"
            )
        if self.chosen:
            lines.append(
                f"{', '.join(self.chosen)}: chosen for MODEL, LORA_RANK={config.lora_rank} and "
                f"{len(self.train):,} examples. Set them to override."
            )
        return lines


def prepared(config: Config, folder: Path, fitted: Collection[str], processes: int) -> Data:
    """Return DATA for the model of a folder, and the settings that follow from both.

    Args:
        fitted: settings that nobody has given (settings/tuning_rules.py).
        processes: that share a batch.

    Raises SettingsError, CorpusError, TokenizerError, ForeignError.
    """
    longest = hf_model.longest(folder)
    config = tuning_settings.limit_seq_len(config, fitted, longest, processes)
    template = ChatTemplate(folder, config.stop_token, config.model)
    data = prepare(config, template)
    shorter = tuning_settings.shorten_windows(config, fitted, data.examples.positions)
    if shorter != config:  # then there is little to tokenize
        data = prepare(shorter, template)
    windows = data.batches(1).packing.windows
    config = tuning_settings.fit_to_data(shorter, fitted, windows, processes)
    values = config.values()
    chosen = [
        f"{name}={format_value(values[name])}" for name in tuning_rules.FITTED if name in fitted
    ]
    return dataclasses.replace(data, config=config, chosen=chosen)


def prepare(config: Config, template: ChatTemplate) -> Data:
    """Tokenize DATA, and EVAL_DATA if it is set, or find them. Raises SettingsError, CorpusError."""
    if not config.data:
        raise SettingsError(
            [
                "DATA is not set. Give conversations to train on, for example DATA=chats.jsonl; "
                "docs/finetune.md lists what is read."
            ]
        )
    report = list(template.remarks)

    def read(data: str, setting: str, stored_key: str = "") -> Examples:
        folder = data_dir(config) / "finetune"
        examples = examples_of(
            data, template, config.seq_len, folder, config.hf_token, setting, stored_key
        )
        report.extend(f"{setting}: {line}" for line in examples.report)
        return examples

    wanted = tuning_rules.HELD_OUT_CONVERSATIONS
    examples = evaluation = read(config.data, "DATA", find_stored_key(config))
    parts = split(examples, config.seed, wanted)
    held_out = parts.held_out
    if config.eval_data:
        evaluation = read(config.eval_data, "EVAL_DATA")
        parts = split(examples, config.seed, 0, beside=evaluation)
        held_out = choose_examples(evaluation.index, config.seed, wanted)
    if not len(parts.train):
        raise CorpusError(
            f"DATA={config.data}: no conversation is left to train on, since all of it is in "
            f"EVAL_DATA={config.eval_data} as well. Give other data."
        )
    return Data(config, template, examples, parts.train, evaluation, held_out, parts.copies, report)


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


def run(argv: Sequence[str]) -> None:
    """Do what the command does. Raises ExpectedError, OSError."""
    take_words(argv, (BEFORE_TRAINING, COUNT))
    config = tuning_settings.load_settings()
    if COUNT in argv:
        sys.stdout.write(json.dumps(count_steps(config)))
        return
    was_here = model_folder.is_here(config)
    folder = model_folder.bring(config)
    if BEFORE_TRAINING in argv and not was_here:
        refuse_plan()
    processes = config.nodes * (config.nproc or 1)
    data = prepared(config, folder, find_fitted(), processes)
    if BEFORE_TRAINING not in argv:
        sys.stdout.write("\n".join([*data.lines, "", data.preview(sys.stdout.isatty())]) + "\n")


def count_steps(config: Config) -> dict[str, Any]:
    """Return MAX_STEPS and what is chosen for MODEL and DATA, if both are on this machine.

    Raises SettingsError, CorpusError, TokenizerError, ForeignError.
    """
    folder = model_folder.find(config)
    for setting, given in (("DATA", config.data), ("EVAL_DATA", config.eval_data)):
        for source, _ in sources_in(given, setting) if given else ():
            if source_of(source, setting).kind == "hub":
                raise CorpusError(
                    f"{setting}={source} is on the Hub, and `make finetune` downloads it."
                )
    fitted = find_fitted()
    data = prepared(config, folder, fitted, config.nproc or 1)
    config = data.config
    steps = data.batches(1, config.epochs).steps
    chosen = {name.lower(): config.values()[name] for name in fitted}
    return chosen | {"max_steps": min(steps, config.max_steps or steps)}


class PlanRefused(ExpectedError):
    """The plan of a model that was not here before says that the run must not begin."""


def refuse_plan() -> None:
    """Plan what could not be planned before MODEL was here. Raises PlanRefused."""
    done = subprocess.run(
        [sys.executable, "-m", "doctor.before_run", "finetune"],
        cwd=ROOT,
        check=False,
        text=True,
        stderr=subprocess.PIPE,
    )
    if done.returncode:
        refused = PlanRefused(done.stderr.rstrip("\n"))
        refused.exit_code = done.returncode
        raise refused
    sys.stderr.write(done.stderr)


def main(argv: Sequence[str] = ()) -> int:
    """Prepare, and say what is wrong. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        run(argv)
        return 0
    except ExpectedError as error:
        code = exit_code_of(error, error.exit_code)
        why = explain_error(error)
    except OSError as error:
        code = exit_code_of(error, BAD_DATA)
        why = (
            f"{error.filename or 'a disk of DATA_DIR or RUNS_DIR'}: cannot be read or written "
            f"({error.strerror or error}). Free some space, fix its permissions, or set another "
            "DATA_DIR or RUNS_DIR."
        )
    except KeyboardInterrupt:
        complain("Stopped. What was prepared before is as it was.")
        return STOPPED
    complain(why)
    report_exit(
        code, why=" ".join(why.split())
    )  # for the other nodes, which train/start_node.py tells
    return code


if __name__ == "__main__":
    set_target("finetune")
    sys.exit(main(sys.argv[1:]))
