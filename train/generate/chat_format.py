"""How a conversation is written for a fine-tuned model: special tokens around each message.

    own      <|endoftext|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello<|end|>
    chatml   <|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n...

Every tokenizer that is trained here reserves the tokens of `own` (tokenizer.py). Qwen and many others
have those of ChatML. The first format whose tokens a tokenizer has is used.

`Format.template` says it as a Jinja template, for tokenizer_config.json. Text that spells a special
token becomes one: the libraries that read the template do so.
"""

import dataclasses

from train.data.tokenizer import END_OF_TEXT, TokenizerError, Vocabulary

ROLES = ("system", "user", "assistant")


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
        unknown = [token for token in made.tokens if token not in special]
        if not unknown:
            return made
        missing.append(" ".join(unknown))
    raise TokenizerError(
        "the tokenizer has no special tokens for conversations: it lacks "
        f"{'; or for ChatML '.join(missing)}. Only a model that was fine-tuned with such tokens can "
        "chat. `make sample` continues a text with any model."
    )
