"""`make sample`: text from a pretrained run's checkpoint, or from INIT_FROM.

    PROMPT, or standard input, or the prompt of the run's own sample -> SAMPLES texts -> standard output

Standard output has the text alone; several follow each other, each under a line of its own. Remarks
go to standard error. Sample n of SEED=s equals the first one of SEED=s+n-1.

A prompt longer than SEQ_LEN is refused. A text that outgrows SEQ_LEN continues from its latest half.

Exit codes are those of command.py.
"""

import logging
import sys
import time

from settings.config import Config
from train import console
from train.checkpoint.manifest import CheckpointError
from train.data import prepare
from train.distributed.world import World
from train.generate.command import read_prompt, refuse, run_command
from train.generate.load_run import Trained, open_trained
from train.model.generate import Choice, TextStream, generate

log = logging.getLogger(__name__)


def main() -> int:
    """Continue a text. Returns the exit code."""
    return run_command(run, sys.stderr)


def run(config: Config, world: World) -> int:
    """Open the model and write what is asked for."""
    prompt = read_prompt(config)
    trained = open_trained(config, world)
    for name, weight in trained.model.named_parameters():
        if not weight.isfinite().all():  # of a run that diverged: any token would be as likely
            raise CheckpointError(
                f"{trained.source}: {name} holds values that are infinite or NaN. Choose an earlier "
                "checkpoint with STEP (make checkpoints lists them)."
            )
    log.info(
        "%s: %s, %.2fM parameters, SEQ_LEN=%d, on %s",
        trained.source,
        f"step {trained.step}" if trained.facts else "imported weights",
        sum(weight.numel() for weight in trained.model.parameters()) / 1e6,
        trained.config.seq_len,
        world.device,
    )
    trained.model.to(trained.model.dtype)  # once, and not for each token
    continue_prompt(trained, prompt)
    return 0


def continue_prompt(trained: Trained, prompt: str) -> None:
    """Write SAMPLES texts that begin with the prompt, by default that of the sample of the run."""
    config = trained.config
    if not prompt and trained.facts:
        prompt = prepare.source_of(config, next(iter(config.mixture))).prompt
        log.info('PROMPT is not set, so the text starts with "%s"', prompt)
    ids = [trained.vocabulary.end_of_text, *trained.vocabulary.encode(prompt)]
    write(trained, ids, before=prompt)


def write(trained: Trained, ids: list[int], before: str) -> None:
    """Write SAMPLES texts that continue these ids.

    A single one is written as it comes. Raises SettingsError if SEQ_LEN has no room for the ids.

    Args:
        before: text that each begins with.
    """
    config = trained.config
    if len(ids) > config.seq_len:
        refuse(
            f"PROMPT: {len(ids)} tokens, and the context is SEQ_LEN={config.seq_len}. "
            "Shorten the text."
        )
    if len(ids) + config.sample_tokens > config.seq_len + 1:
        log.info("Context: SEQ_LEN=%d tokens. Older text is dropped.", config.seq_len)
    samples = range(config.samples)
    output = console.WrappedText(sys.stdout)
    is_single = config.samples == 1
    streams = [TextStream(trained.vocabulary, ids) for _ in samples]
    texts = [""] * config.samples
    count = 0

    def add(number: int, part: str) -> None:
        texts[number] += part
        if is_single:
            output.write(part)

    began = time.perf_counter()
    try:
        if is_single:
            output.write(before)
        rows = generate(
            trained.model,
            [ids for _ in samples],
            config.sample_tokens,
            Choice(config.sample_temperature, config.sample_top_k, config.sample_top_p),
            [config.seed + number for number in samples],
            trained.vocabulary,
        )
        for row in rows:
            for number, token in enumerate(row):
                if token is not None:
                    add(number, streams[number].add(token))
                    count += 1
    finally:
        for number in samples:
            add(number, streams[number].rest())
        if is_single:
            output.write("\n")
    took = time.perf_counter() - began
    if not is_single:
        for number, text in enumerate(texts):
            head = f"==== {number + 1} of {config.samples}, SEED={config.seed + number}"
            output.write(f"{head}\n{before}{text}\n")
    log.info("\n%d tokens in %.2f s, %.1f tokens/s", count, took, count / took)


if __name__ == "__main__":
    sys.exit(main())
