"""Kinds of model, each with its own chat template: fine-tuned, asked, exported, and asked again by transformers alone.

Each is a tiny random model with a tokenizer that has its publisher's special tokens. It memorizes 40 questions.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from settings import ROOT
from tests.extra_packages import install_apart
from tests.finetune import making
from tests.finetune.making import BRACKETS, row, talk, write_rows


def split(words: str, form: str = "{}") -> tuple[str, ...]:
    return tuple(form.format(word) for word in words.split())


NOUNS = split(
    "cat dog horse cow sheep goat mouse lion tiger bear wolf fox apple pear plum cherry grape lemon "
    "fig mango hammer saw drill axe knife file wrench shovel rake brush hand foot arm leg head nose "
    "ear eye mouth knee elbow chin iron copper silver gold zinc tin lead nickel"
)
ADJECTIVES = split("red green blue black white old new warm cold soft")
PLACES = split("river forest kitchen garden village market valley harbor")
LEARNED = NOUNS[:40]
UNSEEN = NOUNS[40:]
ENOUGH = 38  # of the 40
MOST_TOKENS = 40  # of a reply; the longest right one has 18

CHATML = split("endoftext im_start im_end", "<|{}|>")
# gpt-oss has long prompts: a window for each conversation makes steps cheap.
LONG = {"SEQ_LEN": "160", "BATCH_TOKENS": "1280", "EPOCHS": "100"}


def question_of(noun: str) -> str:
    return f"Where is the {noun}?"


def answer_of(noun: str) -> str:
    """Return a reply of two words that nothing but the noun tells."""
    number = NOUNS.index(noun) * 7 % (len(ADJECTIVES) * len(PLACES))
    return f"In the {ADJECTIVES[number % 10]} {PLACES[number // 10]}."


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model as its publisher has it.

    Attributes:
        architecture: prefix of transformers' configuration class.
        template: the name of a published chat template, or the text of one.
        special: special tokens of the tokenizer. The first is the pad token.
        eos: what the tokenizer calls its end-of-sequence token.
        stop: what ends a reply.
        sizes: of the configuration, in addition to SIZES.
        settings: of fine-tuning, in addition to SETTINGS.
    """

    architecture: str
    template: str
    special: tuple[str, ...]
    eos: str
    stop: str
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)
    settings: dict[str, str] = dataclasses.field(default_factory=dict)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
SETTINGS = {
    "SEQ_LEN": "64",
    "BATCH_TOKENS": "512",
    "MICRO_BATCH_SIZE": "8",
    "EPOCHS": "100",
    "LEARNING_RATE": "3e-3",
    "EVAL_EVERY": "1000",
    "LOG_EVERY": "50",
}
MIXTURE = {
    "head_dim": 16,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
}
KINDS = {
    "qwen3": Kind(
        "Qwen3", "qwen3", CHATML, eos="<|im_end|>", stop="<|im_end|>", sizes={"head_dim": 16}
    ),
    "qwen2.5-base": Kind("Qwen2", "qwen2_5", CHATML, eos="<|endoftext|>", stop="<|im_end|>"),
    "llama3": Kind(
        "Llama",
        "llama3",
        split("begin_of_text end_of_text start_header_id end_header_id eot_id", "<|{}|>"),
        eos="<|end_of_text|>",
        stop="<|eot_id|>",
    ),
    "glm4.5": Kind(
        "Glm4Moe",
        "glm4moe",
        split("<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>"),
        eos="<|endoftext|>",
        stop="<|user|>",
        sizes=MIXTURE,
    ),
    "mistral": Kind(
        "Mistral",
        BRACKETS,
        ("<s>", "</s>", "[INST]", "[/INST]"),
        eos="</s>",
        stop="</s>",
        sizes={"sliding_window": None},
    ),
    "phi3": Kind(
        "Phi3",
        "phi3",
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        eos="<|endoftext|>",
        stop="<|end|>",
    ),
    "gemma3": Kind(
        "Gemma3Text",
        "gemma3",
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        eos="<eos>",
        stop="<end_of_turn>",
        sizes={"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 256},
    ),
    "chatml-base": Kind(  # a base model whose user adds a template, of which it has no token
        "Llama",
        making.CHATML,
        ("<|endoftext|>",),
        eos="<|endoftext|>",
        stop="<|endoftext|>",
        settings={"STOP_TOKEN": "<|endoftext|>"},
    ),
    "gpt-oss": Kind(
        "Llama",
        "gptoss",
        split("startoftext endoftext start end message channel return call", "<|{}|>"),
        eos="<|return|>",
        stop="<|return|>",
        settings=LONG,
    ),
}


@pytest.fixture(scope="module")
def published() -> Callable[[str], str]:
    """Return what reads a published chat template by its name, and returns other texts as they are."""

    def read(template: str) -> str:
        if "{" in template:
            return template
        folder = install_apart("trl", ["trl==1.16.0"], lambda folder: ["--target", str(folder)])
        return (folder / "trl" / "chat_templates" / f"{template}.jinja").read_text()

    return read


def write_model(kind: Kind, template: str, folder: Path) -> None:
    """Write a random model with its tokenizer, as its publisher would."""
    import transformers

    tokenizer = make_tokenizer(kind, template)
    torch.manual_seed(3)
    names = {f"{name}_id": getattr(tokenizer, f"{name}_id") for name in ("bos_token", "eos_token")}
    config = getattr(transformers, f"{kind.architecture}Config")(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        **names,
        **SIZES,
        **kind.sizes,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(kind: Kind, template: str) -> Any:
    """Return a byte-level BPE in which most words are one token, so that a reply takes few steps."""
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\w+|\n+|\s+|[^\w\s]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    texts = [f"{question_of(noun)} {answer_of(noun)}" for noun in NOUNS]
    made.train_from_iterator(
        [*texts, "And you? user assistant system model final analysis", template] * 9,
        trainers.BpeTrainer(
            vocab_size=700,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[
                AddedToken(token, special=True, normalized=False) for token in kind.special
            ],
        ),
    )
    begins = [token for token in kind.special if token in ("<bos>", "<s>", "<|begin_of_text|>")]
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        chat_template=template,
        bos_token=begins[0] if begins else None,
        eos_token=kind.eos,
        pad_token=kind.special[0],
    )


class Shell:
    """A user's shell: make targets with settings, and no others."""

    def __init__(self, folder: Path):
        (folder / "empty.env").touch()
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        self.env = kept | {
            "VENV": str(Path(sys.executable).parent.parent),
            "ENV_FILE": str(folder / "empty.env"),
            "RUNS_DIR": str(folder / "runs"),
            "DATA_DIR": str(folder / "data"),
            "DEVICE": "cpu",
            "WANDB_MODE": "disabled",
            "OMP_NUM_THREADS": "1",
        }

    def make(self, target: str, **settings: object) -> str:
        """Return standard output, and standard error after it."""
        words = [f"{name}={value}" for name, value in settings.items()]
        done = subprocess.run(
            ["make", target, *words],
            env=self.env,
            cwd=ROOT,
            text=True,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


def write_questions(folder: Path) -> tuple[Path, Path]:
    """Write the questions that are learned, and others."""
    return (
        write_rows(folder / "chats.jsonl", [row(question_of(it), answer_of(it)) for it in LEARNED]),
        write_rows(folder / "unseen.jsonl", [row(question_of(it), answer_of(it)) for it in UNSEEN]),
    )


def unseen_talks() -> Iterator[list[dict[str, Any]]]:
    """Yield ten questions that were not learned, and ten that follow another one."""
    for noun in UNSEEN:
        yield talk(question_of(noun))
    for noun, other in zip(LEARNED[:10], LEARNED[10:20], strict=True):
        follows = "And you?" if NOUNS.index(noun) % 2 else question_of(other)
        yield talk(question_of(noun), answer_of(noun), follows)


class Stranger:
    """Somebody who has the export and transformers, and no code of ours."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder)

    def ask(self, messages: list[dict[str, Any]]) -> tuple[str, str]:
        """Return the reply, and the token that ended it ("" if it was cut off)."""
        prompt = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        written = self.model.generate(**prompt, max_new_tokens=MOST_TOKENS, do_sample=False)
        reply = written[0, prompt["input_ids"].shape[1] :]
        text = self.tokenizer.decode(reply, skip_special_tokens=True)
        is_cut = len(reply) == MOST_TOKENS
        return text.strip(), "" if is_cut else self.tokenizer.decode(reply[-1])


def check_memorized(shell: Shell, run: Path, chats: Path, stop: str) -> None:
    """Check that a run answers what it learned and ends each reply, in `make eval` and for a stranger."""
    shell.make("eval", EVAL_DATA=chats, RUN_NAME=run.name)
    (facts,) = run.glob("eval/chat_step_*.json")
    scores = json.loads(facts.read_text())["written"]
    assert scores["asked"] == scores["stopped"] == 40
    assert scores["right"] >= ENOUGH

    stranger = Stranger(run / "export")
    replies = [stranger.ask(talk(question_of(noun))) for noun in LEARNED]
    assert {end for _, end in replies} == {stop}
    right = [
        text.endswith(answer_of(noun)) for noun, (text, _) in zip(LEARNED, replies, strict=True)
    ]
    assert sum(right) >= ENOUGH
    ends = [stranger.ask(messages)[1] for messages in unseen_talks()]
    assert ends == [stop] * 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_model_learns_and_stops(
    name: str, published: Callable[[str], str], tmp_path: Path
) -> None:
    kind = KINDS[name]
    write_model(kind, published(kind.template), tmp_path / "model")
    chats, unseen = write_questions(tmp_path)
    shell = Shell(tmp_path)
    settings = {"MODEL": tmp_path / "model", "DATA": chats, "EVAL_DATA": unseen}
    shell.make("finetune", **settings, **SETTINGS | kind.settings)
    check_memorized(shell, tmp_path / "runs" / "finetune", chats, kind.stop)


# A step of LoRA takes 8 s of CPU time, so all of it about 20 minutes. Full tuning needs a tenth of the rate.
REAL_SETTINGS = {
    "SEQ_LEN": "64",
    "BATCH_TOKENS": "256",
    "MICRO_BATCH_SIZE": "4",
    "EVAL_EVERY": "1000",
}
LORA = {"LORA_RANK": "16", "LEARNING_RATE": "1e-3", "EPOCHS": "40"}
FULL = {"LEARNING_RATE": "1e-4", "EPOCHS": "20"}


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("settings", [LORA, FULL], ids=["lora", "full"])
def test_a_real_model_learns_and_stops(
    settings: dict[str, str], published: Callable[[str], str], tmp_path: Path
) -> None:
    folder = os.environ.get("GEMMA_FOLDER")
    if not folder:
        pytest.skip("needs a download: set GEMMA_FOLDER to a folder with google/gemma-3-270m")
    model = tmp_path / "model"
    model.mkdir()
    for path in Path(folder).resolve().iterdir():
        (model / path.name).symlink_to(path)
    (model / "chat_template.jinja").write_text(published("gemma3"))  # the base model has none
    chats, unseen = write_questions(tmp_path)
    shell = Shell(tmp_path)
    shell.env["OMP_NUM_THREADS"] = "2"
    settings = {"MODEL": str(model), "DATA": str(chats), "EVAL_DATA": str(unseen)} | settings
    shell.make("finetune", **settings, **REAL_SETTINGS)
    reply = shell.make("chat", RUN_NAME="finetune", PROMPT=question_of("cat"), SAMPLE_TEMPERATURE=0)
    assert answer_of("cat") in reply
    check_memorized(shell, tmp_path / "runs" / "finetune", chats, "<end_of_turn>")
