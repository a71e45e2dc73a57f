"""How a conversation is written for a fine-tuned model: special tokens around each message.

    own      <|endoftext|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello<|end|>
    chatml   <|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n...

Every tokenizer that is trained here reserves the tokens of `own` (tokenizer.py). Qwen and many others
have those of ChatML. The first format whose tokens a tokenizer has is used. The text of a message
never becomes a special token, whatever it spells.

`Format.template` is the same as a Jinja template, for tokenizer_config.json, and gives the same ids.
In it, text that spells a special token becomes one: the libraries that read it do so.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from train.data.tokenizer import END_OF_TEXT, TokenizerError, Vocabulary

ROLES = ("system", "user", "assistant")


class Message(NamedTuple):
    """role: of ROLES."""

    role: str
    text: str


@dataclasses.dataclass(frozen=True)
class Format:
    """What is around a message. {} stands for the name of the role.

    Attributes:
        begin: special token before the first message, or "".
        opening: special token that opens a message.
        heading: text between it and the message.
        end: special token that ends a message.
        behind: text after that.
    """

    name: str
    begin: str
    opening: str
    heading: str
    end: str
    behind: str

    @property
    def tokens(self) -> tuple[str, ...]:
        """The special tokens that it needs, each once."""
        openings = [self.opening.format(role) for role in ROLES]
        tokens = [self.begin, *openings, self.end]
        return tuple(dict.fromkeys(token for token in tokens if token))

    @property
    def template(self) -> str:
        """The template for apply_chat_template in transformers, with add_generation_prompt."""
        head, tail = f"{self.opening}{self.heading}".replace("\n", "\\n").split("{}")
        close = f"{self.end}{self.behind}".replace("\n", "\\n")
        begin = f"{{{{- '{self.begin}' }}}}" if self.begin else ""
        return (
            f"{begin}{{%- for message in messages %}}"
            f"{{%- if message['role'] not in {list(ROLES)} %}}"
            "{{- raise_exception('a message has the role ' + message['role']) }}{%- endif %}"
            f"{{{{- '{head}' + message['role'] + '{tail}' + message['content'] + '{close}' }}}}"
            "{%- endfor %}"
            f"{{%- if add_generation_prompt %}}{{{{- '{head}assistant{tail}' }}}}{{%- endif %}}"
        )


OWN = Format("own", END_OF_TEXT, "<|{}|>", "", "<|end|>", "")
CHATML = Format("chatml", "", "<|im_start|>", "{}\n", "<|im_end|>", "\n")


def format_of(vocabulary: Vocabulary) -> Format:
    """Return the format whose tokens a tokenizer has. Raises TokenizerError."""
    added = vocabulary.tokenizer.get_added_tokens_decoder()
    special = {token.content for token in added.values() if token.special}
    missing = []
    for made in (OWN, CHATML):
        lacking = [token for token in made.tokens if token not in special]
        if not lacking:
            return made
        missing.append(" ".join(lacking))
    raise TokenizerError(
        "the tokenizer has no special tokens for conversations: it lacks "
        f"{'; or for ChatML '.join(missing)}. Only a model that was fine-tuned with such tokens can "
        "chat. `make sample` continues a text with any model."
    )


def special_tokens(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the id of each token that the tokenizer's format needs; {} if it has no format."""
    try:
        tokens = format_of(vocabulary).tokens
    except TokenizerError:
        return {}
    added = vocabulary.tokenizer.get_added_tokens_decoder()
    ids = {token.content: number for number, token in added.items()}
    return {token: ids[token] for token in tokens}


def render(vocabulary: Vocabulary, messages: Sequence[Message], reply: bool = True) -> list[int]:
    """Return the token ids of a conversation. Raises TokenizerError, or ValueError for a wrong role.

    Args:
        reply: continue to where the assistant's next message begins.
    """
    made = format_of(vocabulary)
    special = special_tokens(vocabulary)
    ids = [special[made.begin]] if made.begin else []
    for role, text in messages:
        if role not in ROLES:
            raise ValueError(f"a message has the role {role}; there are {', '.join(ROLES)}")
        ids.append(special[made.opening.format(role)])
        ids += vocabulary.encode(made.heading.format(role) + text)
        ids.append(special[made.end])
        ids += vocabulary.encode(made.behind)
    if reply:
        ids.append(special[made.opening.format("assistant")])
        ids += vocabulary.encode(made.heading.format("assistant"))
    return ids
