"""What the stages need, fetched and verified before the first begins; all that is wrong is said together.

    at once    settings of every stage, this machine and its disks, whether files and bundle are there
    then       token shards and tokenizer of the base; conversations of each stage, tokenised as its model will have
               them; questions; the bundle of CORE

The tokenizer is there before the base is trained, so the folder that its export will be is made without weights, and
what fine-tuning will read is prepared by it: the stages find it done.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from doctor.before_run import look
from export import files
from finetune import conversations as chats
from finetune import exercises, hf_model, prepare_data, questions
from finetune.chat_template import ChatTemplate
from finetune.tuning_settings import refuse_single_step
from hardware.model_size import parameters
from pipeline.stages import Stage
from pipeline.state import State
from record import number_formats
from record.durable import write_whole
from record.locks import RunFolderError
from record.run_paths import RunPaths
from settings import ROOT, SettingsError
from settings.config import Config
from settings.finding import format_findings, split
from settings.resolve import show_path
from train.data import prepare
from train.data.data_paths import data_dir, pinned_of, tokenizer_path
from train.data.manifest import DataError
from train.data.sources.source import CorpusError
from train.data.tokenizer import TokenizerError, Vocabulary
from train.evaluate.core.bundle import open_bundle
from train.generate import chat_format
from train.generate.chat_format import Message
from train.model.hf_import import ForeignError
from train.model.model import NORM_EPS

BAD_DATA = (CorpusError, TokenizerError, DataError, ForeignError, RunFolderError, OSError)
MOMENTS = 12  # bytes of a parameter in a checkpoint: weight and two moments, float32
log = logging.getLogger(__name__)


@dataclasses.dataclass
class Problems:
    """What was found. settings: mended by a setting; others: by data or machine."""

    settings: list[str] = dataclasses.field(default_factory=list)
    others: list[str] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.settings or self.others)

    @property
    def code(self) -> int:
        """64 only where settings alone mend it."""
        return 78 if self.others else 64

    def of(self, make: Callable[[], Any], stage: Stage | None = None) -> Any:
        """What is made, or None where that cannot be, which is noted."""
        try:
            return make()
        except SettingsError as error:
            for problem in error.problems:
                self.setting(problem, stage)
        except BAD_DATA as error:
            self.other(as_user_says(str(error), stage))
        return None

    def setting(self, problem: str, stage: Stage | None = None) -> None:
        if problem not in self.settings:  # one of all stages is said once
            told = as_user_says(problem, stage)
            self.settings.append(f"{stage.title}: {told}" if stage and told != problem else told)

    def other(self, problem: str) -> None:
        if problem not in self.others:
            self.others.append(problem)

    def text(self) -> str:
        every = [*self.settings, *self.others]
        count = "1 problem" if len(every) == 1 else f"{len(every)} problems"
        return "\n  ".join([f"{count}, and no stage was begun:", *every])


def as_user_says(problem: str, stage: Stage | None) -> str:
    """With the names that the user knows: MID_DATA for DATA."""
    if not stage or not stage.names:
        return problem
    return re.sub(rf"\b({'|'.join(stage.names)})\b", lambda found: stage.names[found[0]], problem)


@dataclasses.dataclass(frozen=True)
class Ready:
    """What is known once all is verified. configs: by stage; inputs: of each stage, name -> hash; prompts: of the
    sample."""

    configs: dict[str, Config]
    inputs: dict[str, dict[str, str]]
    prompts: tuple[str, ...]


# ---- At once


def configs_of(stages: list[Stage], problems: Problems) -> dict[str, Config]:
    found = {stage.key: problems.of(stage.load, stage) for stage in stages}
    return {key: c for key, c in found.items() if c}


def look_round(
    c: Config,
    stages: list[Stage],
    configs: dict[str, Config],
    state: State,
    core: bool,
    problems: Problems,
) -> list[str]:
    """What takes no time. Returns what is to be said: the plan of the base, and warnings."""
    said: list[str] = []
    told: set[str] = set()
    for stage in stages:
        if stage.key in configs:
            has_run = RunPaths.of(c.runs_dir, stage.run, ROOT).config.exists()
            for problem in state.changed_settings(stage, configs[stage.key], told, has_run):
                problems.setting(problem)
        made = {
            path: fingerprint_of(ROOT / path)
            for path in state.stages.get(stage.key, {}).get("made", {})
        }
        for problem in state.changed_outputs(stage, made):
            problems.other(problem)
    for name in exercises.PART:
        if getattr(c, name.lower()):
            problems.of(functools.partial(look_at_sources, c, name))
    if (
        core
        and c.core_bundle.partition("://")[0] not in ("http", "https")
        and not (ROOT / c.core_bundle).exists()
    ):
        problems.other(
            f"CORE_BUNDLE={c.core_bundle}: there is no such folder or .zip; give one, or leave it out"
        )
    base = configs.get("base")
    if base and not state.is_done(stages[0]):
        found, planned = look(base)
        stopping, _ = split(c.allow_fail, found)
        said += [
            *format_findings([one for one in found if one not in stopping]),
            *([planned] if planned else []),
        ]
        for one in stopping:
            (problems.setting if one.code == 64 else problems.other)(
                f"{one.name}: {one.text}; {one.fix}"
            )
    if base:
        check_room(
            base, [stage for stage in stages if stage.trains and not state.is_done(stage)], problems
        )
    return said


def look_at_sources(c: Config, name: str) -> None:
    """Whether each source of a setting is a file, a folder or a name on the hub. Raises CorpusError."""
    for source, _ in chats.sources_in(exercises.data_of(c, name), name):
        chats.source_of(source, name)


def check_room(c: Config, ahead: list[Stage], problems: Problems) -> None:
    """Whether RUNS_DIR has room for checkpoints and exports of all that is still to be trained."""
    there = next(
        path
        for path in ((ROOT / c.runs_dir).absolute(), *(ROOT / c.runs_dir).absolute().parents)
        if path.exists()
    )
    numbers = parameters(c).total
    held_in = [
        0 if stage.tunes and c.lora_rank else MOMENTS * (c.keep_last + 1) for stage in ahead
    ]  # adapters: little
    whole = numbers * (sum(held_in) + 4 * len(ahead))
    held = sum(
        path.stat().st_size
        for stage in ahead
        for path in RunPaths.of(c.runs_dir, stage.run, ROOT).folder.glob("**/*")
        if path.is_file()
    )
    need, free = max(0, whole - held), shutil.disk_usage(there).free
    if need > free:
        problems.other(
            f"RUNS_DIR={c.runs_dir}: {show_path(there)} has {number_formats.size(free)} free, and checkpoints and "
            f"exports of {len(ahead)} stages take {number_formats.size(need)} more; make room, choose another "
            f"RUNS_DIR, or keep fewer (KEEP_LAST=2)"
        )


# ---- Then


def verify(
    c: Config,
    stages: list[Stage],
    configs: dict[str, Config],
    state: State,
    folder: Path,
    core: bool,
    problems: Problems,
) -> Ready:
    """Fetch, prepare and check all data. folder: of the pipeline."""
    base, inputs, prompts = (
        configs["base"],
        {stage.key: dict[str, str]() for stage in stages},
        list[str](),
    )
    log.info("==== inputs of all stages")

    def prepared() -> Vocabulary:
        prepare.prepare(base, whole=base.data_stream != "1" and not state.is_done(stages[0]))
        return prepare.vocabulary(base)

    v: Vocabulary | None = problems.of(prepared)
    if core:
        bundle = problems.of(lambda: open_bundle(c.core_bundle, data_dir(c)))
        if bundle:
            log.info("%s", bundle.words())
            inputs["evaluation"]["CORE_BUNDLE"] = bundle.sha256
    sheet = problems.of(lambda: questions.sheet_of(c))
    if v:
        vocabulary = v
        inputs["base"] = {
            "DATA_MIX": digest([pinned_of(base, name).key for name in base.mixture]),
            "TOKENIZER": vocabulary.sha256,
        }
        if sheet:
            problems.of(
                lambda: questions.fitting(
                    sheet, vocabulary, base.seq_len, lambda line: log.info("%s", line)
                )
            )
        model_folder = problems.of(lambda: weightless(base, vocabulary, folder / "model"))
        if model_folder:
            look_at_tuning(stages, configs, state, model_folder, problems)
        for stage in stages if model_folder else []:
            if stage.tunes and stage.key in configs:
                read = problems.of(
                    functools.partial(conversations, configs[stage.key], model_folder), stage
                )
                if read and not state.is_done(stage):
                    problems.of(
                        functools.partial(
                            refuse_single_step,
                            configs[stage.key],
                            read.batches(1).packing.windows,
                            epochs_are_fixed=True,
                        ),
                        stage,
                    )
                if read:
                    log.info(
                        "%s",
                        "\n".join(
                            f"{stage.title}: {as_user_says(line, stage)}" for line in read.lines
                        ),
                    )
                    inputs[stage.key] = {
                        stage.names["DATA"]: read.examples.key,
                        "EVAL_DATA": read.evaluation.key,
                    }
    if sheet:
        log.info(
            "chat evaluation: %d questions of %d rows, %d of them multiple choice",
            len(sheet.asked),
            sheet.rows,
            sum(bool(one.options) for one in sheet.asked),
        )
        prompts = problems.of(functools.partial(prompts_of, c, sheet, v, base.seq_len)) or []
        asked = digest([[one.messages, one.answer, one.options] for one in sheet.asked])
        inputs |= {key: {"EVAL_DATA": asked} for key in inputs if key.startswith("chat-")}
    for stage in stages:
        for problem in state.changed_inputs(stage, inputs[stage.key]):
            problems.other(problem)
    return Ready(configs, inputs, tuple(prompts))


def look_at_tuning(
    stages: list[Stage], configs: dict[str, Config], state: State, folder: Path, problems: Problems
) -> None:
    """What make finetune would look at before it begins: batch, memory, disk."""
    for stage in stages:
        if not stage.tunes or stage.key not in configs or state.is_done(stage):
            continue
        c = configs[stage.key].replace(model=str(folder))
        for one in split(c.allow_fail, look(c, finetune=True)[0])[0]:
            told = as_user_says(f"{one.name}: {one.text}; {one.fix}", stage)
            (problems.setting if one.code == 64 else problems.other)(f"{stage.title}: {told}")


def prompts_of(c: Config, sheet: questions.Sheet, v: Vocabulary | None, seq_len: int) -> list[str]:
    """What the sample answers: PROMPT, or the first question of each kind that fits. Raises SettingsError."""

    def fits(text: str) -> bool:
        return v is None or len(chat_format.render(v, [Message("user", text)])) <= seq_len

    if c.prompt:
        if not fits(c.prompt):
            raise SettingsError(
                [f"PROMPT: does not fit into SEQ_LEN={seq_len} tokens; give a shorter one"]
            )
        return [c.prompt]
    kinds: dict[bool, str] = {}
    for one in sheet.asked:
        if bool(one.options) not in kinds and fits(one.messages[-1].text):
            kinds[bool(one.options)] = one.messages[-1].text
    return [kinds[kind] for kind in sorted(kinds, reverse=True)]


def conversations(c: Config, folder: Path) -> prepare_data.Data:
    """DATA of a stage, prepared as the stage will find it. Raises SettingsError, CorpusError, TokenizerError."""
    return prepare_data.prepare(c, ChatTemplate(folder, c.stop_token, c.model))


def weightless(c: Config, v: Vocabulary, folder: Path) -> Path:
    """The base's export without its weights: what says how its conversations are written. Raises TokenizerError."""
    chat_format.format_of(v)  # says which tokens are lacking
    template_, ends = files.chat_of(v)
    for name, content in (
        ("config.json", files.config_json(c, v, c.dtype, NORM_EPS)),
        ("generation_config.json", files.generation_config(v, ends)),
        ("tokenizer_config.json", files.tokenizer_config(c, v, template_)),
    ):
        write_whole(
            folder / name, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
        )
    write_whole(folder / "tokenizer.json", files.tokenizer_json(tokenizer_path(c).read_bytes()))
    return folder


def fingerprint_of(folder: Path) -> str:
    """Of an export; "" where it is not there."""
    try:
        return hf_model.fingerprint(folder)
    except ForeignError:
        return ""


def digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
