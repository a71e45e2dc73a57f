"""How a conversation is written for a model that was fine-tuned to hold one: special tokens round each message.

    own      <|endoftext|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello<|end|>
    chatml   <|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n...

Own are the tokens that every tokenizer trained here reserves (tokenizer.py); ChatML is what Qwen and many others have.
The first whose tokens a tokenizer has is taken. A message's text never becomes a special token, whatever it spells.

`Format.template` is the same as a Jinja template, as tokenizer_config.json has it: it gives the same ids. There a text
that spells a special token out becomes one: so do the libraries that read it.
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
    """begin: a special token before the first message, or "". opening: the special token that opens a message of a
    role, {} for the role's name; heading: text behind it, before the message's; end, behind: the special token that
    ends it, and text behind that."""

    name: str
    begin: str
    opening: str
    heading: str
    end: str
    behind: str

    @property
    def tokens(self) -> tuple[str, ...]:
        """The special tokens that it needs, each once."""
        opening = (self.opening.format(role) for role in ROLES)
        return tuple(dict.fromkeys(token for token in (self.begin, *opening, self.end) if token))

    @property
    def template(self) -> str:
        """For transformers' apply_chat_template: messages, and add_generation_prompt."""

        def joined(role: str, *parts: str) -> str:
            """An expression of Jinja: the parts one behind the other, with the role for {}."""
            pieces = [
                piece
                for part in parts
                for piece in (part.replace("{}", "\0{}\0").split("\0"))
                if piece
            ]
            quoted = {"{}": role, "TEXT": "message['content']"}
            return " + ".join(
                quoted.get(piece) or "'" + piece.replace("\n", "\\n") + "'" for piece in pieces
            )

        message = joined(
            "message['role']", self.opening, self.heading, "TEXT", self.end, self.behind
        )
        reply = joined("'assistant'", self.opening, self.heading)
        roles = ", ".join(f"'{role}'" for role in ROLES)
        return (
            f"{{{{- '{self.begin}' }}}}" * bool(self.begin) + "{%- for message in messages %}"
            f"{{%- if message['role'] not in [{roles}] %}}"
            "{{- raise_exception('a message has the role ' + message['role']) }}{%- endif %}"
            f"{{{{- {message} }}}}{{%- endfor %}}"
            f"{{%- if add_generation_prompt %}}{{{{- {reply} }}}}{{%- endif %}}"
        )


OWN = Format("own", END_OF_TEXT, "<|{}|>", "", "<|end|>", "")
CHATML = Format("chatml", "", "<|im_start|>", "{}\n", "<|im_end|>", "\n")
FORMATS = (OWN, CHATML)


def format_of(vocabulary: Vocabulary) -> Format:
    """The format whose tokens a tokenizer has. Raises TokenizerError."""
    lacking = {
        made: [token for token in made.tokens if not is_special(vocabulary, token)]
        for made in FORMATS
    }
    for made, tokens in lacking.items():
        if not tokens:
            return made
    raise TokenizerError(
        "the tokenizer has no special tokens for conversations: it lacks "
        + "; or for ChatML ".join(" ".join(tokens) for tokens in lacking.values())
        + ". Only a model that was fine-tuned with such tokens can chat. `make sample` continues a "
        "text with any model."
    )


def is_special(vocabulary: Vocabulary, token: str) -> bool:
    i = vocabulary.tokenizer.token_to_id(token)
    added = vocabulary.tokenizer.get_added_tokens_decoder()
    return i in added and added[i].special


def special_tokens(vocabulary: Vocabulary) -> dict[str, int]:
    """Token -> id of what the tokenizer's format needs; {} where it has none."""
    try:
        needed = format_of(vocabulary).tokens
    except TokenizerError:
        return {}
    return {
        token: i for token in needed if (i := vocabulary.tokenizer.token_to_id(token)) is not None
    }


def render(vocabulary: Vocabulary, messages: Sequence[Message], reply: bool = True) -> list[int]:
    """Token ids of a conversation; reply: up to where the assistant's next message begins. Raises TokenizerError,
    ValueError for a role that is none."""
    made, ids = format_of(vocabulary), list[int]()
    special = special_tokens(vocabulary)
    if made.begin:
        ids.append(special[made.begin])
    for role, text in messages:
        if role not in ROLES:
            raise ValueError(f"a message has the role {role}; there are {', '.join(ROLES)}")
        ids += [
            special[made.opening.format(role)],
            *vocabulary.encode(made.heading.format(role) + text),
            special[made.end],
            *vocabulary.encode(made.behind),
        ]
    if reply:
        ids += [
            special[made.opening.format("assistant")],
            *vocabulary.encode(made.heading.format("assistant")),
        ]
    return ids


def end_of_message(vocabulary: Vocabulary) -> int:
    """The token with which the assistant ends. Raises TokenizerError."""
    return special_tokens(vocabulary)[format_of(vocabulary).end]
