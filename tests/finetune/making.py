"""What tests of fine-tuning share: a small vocabulary, chat templates as models have them, files of conversations."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from finetune.chat_template import ChatTemplate, Message

TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>"]
TEXTS = [
    "It is so. Why is it so? I know. ",
    "user assistant system 2+2? 4 hello world",
    " abc def ghi\n\n",
]


@functools.cache
def backend() -> str:
    """A byte-level BPE of few merges, as tokenizer.json has it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\w+|\s+|[^\w\s]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        TEXTS * 9,
        trainers.BpeTrainer(
            vocab_size=400,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[AddedToken(token, special=True, normalized=False) for token in TOKENS],
        ),
    )
    return made.to_str()


def their_tokenizer(template: str | None, tokenizer: str = "") -> Any:
    """transformers' tokenizer with a chat template."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer or backend()),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )


@functools.cache
def chat_template(text: str) -> ChatTemplate:
    """The template of a model, "a-model", whose chat template is this."""
    with tempfile.TemporaryDirectory() as folder:
        their_tokenizer(text).save_pretrained(folder)
        return ChatTemplate(Path(folder), name="a-model")


REPLY = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    + REPLY
)
# The same, with what the assistant generates marked: with its end of turn, and without.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}" + REPLY
)
MARKED_TIGHT = MARKED.replace("{{ '\n' }}", "")
MARKED_SHORT = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
# As in Llama 2 and Mistral: no header for an answer, no role for the system.
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% elif m['role'] == 'user' %}[INST] {{ m['content'] }} "
    "[/INST]{% else %} {{ m['content'] | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
# As in Qwen3: the last answer begins with an empty thought, those before it with none.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and loop.last %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}" + REPLY
)
# As in DeepSeek-R1: a reply is asked for with the begin of a thought, which no answer that is there has.
ASKS_FOR_THOUGHT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'].split('</think>')[-1] }}"
    "{% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
CUTS_THOUGHT = ASKS_FOR_THOUGHT.replace("<think>\n{% endif %}", "{% endif %}")
ENDLESS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


MARKED_LOOSE = MARKED.replace(
    "<|im_end|>{% endgeneration %}", "<|im_end|>{{ '\n' }}{% endgeneration %}"
).replace(
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}",
    "{% else %}{{ m['content'] }}<|im_end|>{{ '\n' }}{% endif %}",
)
# As in Phi-3: the conversation ends behind the end of its last answer once more.
ENDS_TWICE = CHATML.replace(
    "{% endfor %}", "{% endfor %}{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
)
ONE_TURN = (
    "{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}" + CHATML
)
MARKED_LAST = MARKED.replace("m['role'] == 'assistant'", "m['role'] == 'assistant' and loop.last")


def talk(*texts: str, system: str = "") -> list[Message]:
    """User and assistant in turn."""
    messages = [{"role": "system", "content": system}] if system else []
    for number, text in enumerate(texts):
        messages.append({"role": ("user", "assistant")[number % 2], "content": text})
    return messages


def row(*texts: str, **more: Any) -> dict[str, Any]:
    """A talk as a row of a data set."""
    return {"messages": talk(*texts)} | more


def write_rows(path: Path, rows: list[Any]) -> Path:
    """JSON lines; a text stands as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in rows)
    )
    return path
