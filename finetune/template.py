"""Messages to token ids, and which of them are scored: the assistant's, by the model's own chat template.

    Own      tokenizers trained here: train/generate/chat_format.py
    Theirs   what transformers' apply_chat_template writes for the model's tokenizer, to the token

Scored is what the assistant would have to generate: the text of its message and the special token that ends its turn,
not the header that opens it. With `{% generation %}` in it a template marks that itself: blanks behind the last special
token of a mark are not scored, and a special token right behind a mark that ends with none is. Without, the text up to
an answer, written as for a reply, must be how the conversation begins, and the answer is what comes then, up to the
last special token that the template adds with it:

    before = template(messages up to the answer, add_generation_prompt)
    after  = template(messages with the answer)        before + answer + end = after, and so begins the whole

Some templates write an answer otherwise once another message follows, without its thinking for example: there only the
last answer of a conversation is scored, which is said. Where not even that begins as a reply does, the template is
refused. A message that spells a special token out would become one under transformers: such a conversation is dropped.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from tokenizers import Encoding

from finetune.row_shapes import Unlearned
from settings.resolve import show_path
from train.data.sources.formats import Bad
from train.data.tokenizer import TokenizerError, Vocabulary, load
from train.generate import chat_format
from train.generate.chat_format import Message

RULES = 1  # changes when the same conversations give other ids or marks
REASONS = {
    "template": "the chat template cannot write the conversation, or writes its last answer otherwise than as a "
    "reply",
    "spells": "a message spells a special token out, which would break the template",
}
MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
PROBE = [
    Message("user", "Is it so?"),
    Message("assistant", "It is."),
    Message("user", "Why?"),
    Message("assistant", "I know."),
]
SHOWN = 40  # characters of a text in a message


class Labelled(NamedTuple):
    """ids (n,) and scored (n,) bool of a conversation. unscored: answers that are not, since another message follows;
    altered: answers of which the template leaves text out, or writes it otherwise."""

    ids: np.ndarray
    scored: np.ndarray
    unscored: int = 0
    altered: int = 0


class Template(Protocol):
    """How conversations are written for a model. remarks: what should be said of it; dtype: holds every id."""

    name: str
    fingerprint: str
    dtype: type[np.unsignedinteger]
    remarks: list[str]

    def label(self, conversations: Sequence[list[Message]]) -> list[Labelled | Bad]:
        """Ids and marks of each conversation, or why it has none."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens as they are spelled."""


def find(folder: Path, name: str = "") -> Template:
    """The template of a model's folder: transformers' where its tokenizer_config.json is there, else ours.

    Raises TokenizerError.
    """
    name = name or show_path(folder)
    if (folder / "tokenizer_config.json").is_file():
        return Theirs(their_tokenizer(folder), name)
    if (path := folder / "tokenizer.json").is_file():
        return Own(load(path), name)
    raise TokenizerError(
        f"MODEL={name}: there is no tokenizer_config.json and no tokenizer.json in {folder}; MODEL "
        "must be a folder that holds a model with its tokenizer, as make export writes it"
    )


def their_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of a folder; runs no code of the model's. Raises TokenizerError."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise TokenizerError(
            "the package transformers is not installed, by whose classes a model that was not "
            "trained here is fine-tuned"
        ) from None
    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of many types
        words = " ".join(str(error).split())[:200]
        raise TokenizerError(
            f"{folder}: transformers cannot read its tokenizer ({words}); get the model's folder "
            "again"
        ) from error


def marked(encoding: Encoding, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """(n,) bool: the tokens that begin inside one of the spans of characters.

    A token that begins before one, and reaches into it, is a part of what stands there: a reply never begins so.
    """
    begins = np.fromiter(
        (begin for begin, _ in encoding.offsets), dtype=np.int64, count=len(encoding.ids)
    )
    scored = np.zeros(len(begins), dtype=bool)
    for begin, end in spans:
        scored |= (begins >= begin) & (begins < end)
    return scored


class Own:
    """The formats of train/generate/chat_format.py: text never becomes a special token."""

    def __init__(self, vocabulary: Vocabulary, name: str):
        self.vocabulary, self.name, self.dtype = vocabulary, name, vocabulary.dtype
        self.format, self.special = (
            chat_format.format_of(vocabulary),
            chat_format.special_tokens(vocabulary),
        )
        self.remarks: list[str] = []
        self.fingerprint = digest(RULES, "own", vocabulary.sha256, dataclasses.astuple(self.format))

    def decode(self, ids: Sequence[int]) -> str:
        return self.vocabulary.decode(ids)

    def label(self, conversations: Sequence[list[Message]]) -> list[Labelled | Bad]:
        """The ids are those of chat.render."""
        made, behind = self.format, self.vocabulary.encode(self.format.behind)
        texts = [
            made.heading.format(m.role) + m.text for messages in conversations for m in messages
        ]
        encodings = iter(self.vocabulary.tokenizer.encode_batch(texts, add_special_tokens=False))
        return [self.labelled(messages, encodings, behind) for messages in conversations]

    def labelled(self, messages: list[Message], encodings: Any, behind: list[int]) -> Labelled:
        made, ids, scored = self.format, list[int](), list[bool]()
        if made.begin:
            ids.append(self.special[made.begin])
            scored.append(False)
        for message in messages:
            role, text = message
            encoding, heading = next(encodings), len(made.heading.format(role))
            ids += [
                self.special[made.opening.format(role)],
                *encoding.ids,
                self.special[made.end],
                *behind,
            ]
            is_answer = is_scored(message)
            inside = marked(encoding, [(heading, heading + len(text))] if is_answer else [])
            scored += [False, *inside.tolist(), is_answer, *([False] * len(behind))]
        return Labelled(np.array(ids, dtype=self.dtype), np.array(scored, dtype=bool))


class Theirs:
    """A tokenizer of transformers' with a chat template. Raises TokenizerError where that cannot be learned from."""

    def __init__(self, tokenizer: Any, name: str):
        self.tokenizer, self.name = tokenizer, name
        if not getattr(tokenizer, "is_fast", False):
            raise TokenizerError(
                f"{name}: its tokenizer has no tokenizer.json, which tells which token stands for "
                "which part of a text; take a model that has one"
            )
        try:
            self.template = str(tokenizer.get_chat_template())
        except ValueError:
            raise TokenizerError(
                f"{name}: its tokenizer has no chat template, so how a conversation is written for it "
                "is not known; take the model that was tuned to follow instructions, or put the "
                "template to train with into its folder as chat_template.jinja"
            ) from None
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        self.special = {i for i, token in added.items() if token.special}
        spelled = sorted(
            {added[i].content for i in self.special}, key=lambda token: (-len(token), token)
        )
        self.endings = tuple(spelled)
        self.spelled = re.compile("|".join(map(re.escape, spelled)) or r"(?!)")
        self.dtype = np.uint16 if max(tokenizer.get_vocab().values()) < 2**16 else np.uint32
        self.has_marks = bool(MARKS.search(self.template))
        self.fingerprint = digest(
            RULES,
            "theirs",
            self.template,
            tokenizer.backend_tokenizer.to_str(),
            sorted(map(str, tokenizer.special_tokens_map.items())),
        )
        self.remarks: list[str] = []
        self.look_at_probe()

    def decode(self, ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def written(self, messages: Sequence[Message], reply: bool = False) -> str:
        """The text of a conversation; reply: up to where the next answer begins. Raises Refused."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    theirs(messages), add_generation_prompt=reply, tokenize=False
                )
            )
        except Exception as error:  # a template raises what it likes
            raise refused_by(error) from None

    def look_at_probe(self) -> None:
        """Find out what the template does. Raises TokenizerError where nothing can be scored."""
        once, twice = self.label([PROBE[:2], PROBE])
        if isinstance(once, Bad):
            raise TokenizerError(
                f"{self.name}: its chat template cannot be learned from, since {once.what}; take a "
                "model with another template, or put one with {% generation %} marks into its folder "
                "as chat_template.jinja"
            )
        if PROBE[1].text not in self.decode(once.ids[once.scored]):
            raise TokenizerError(
                f"{self.name}: its chat template marks {self.decode(once.ids[once.scored])!r} as the "
                f"answer where {PROBE[1].text!r} is; put one that marks the answer into its folder as "
                "chat_template.jinja"
            )
        if int(once.ids[once.scored][-1]) not in self.special:
            end = self.decode(once.ids[once.scored][-1:])
            self.remarks.append(
                f"the chat template ends an answer with {end!r} and no special token: what is trained "
                "so may not know where to stop"
            )
        if isinstance(twice, Bad):
            self.remarks.append(f"conversations of several answers are dropped, since {twice.what}")
        elif twice.unscored:
            self.remarks.append(
                "only the last answer of a conversation is scored: the chat template writes earlier "
                "ones otherwise than as a reply"
            )
        if "strftime_now" in self.template:
            self.remarks.append(
                "the chat template writes the date: what is prepared on another day differs in it"
            )

    def label(self, conversations: Sequence[list[Message]]) -> list[Labelled | Bad]:
        """The ids are those of apply_chat_template(tokenize=True)."""
        found = [self.spans(messages) for messages in conversations]
        texts = [one.text for one in found if isinstance(one, Spans)]
        encodings = iter(
            self.tokenizer(
                texts,
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            ).encodings
            if texts
            else ()
        )
        labelled: list[Labelled | Bad] = []
        for one in found:
            if isinstance(one, Spans):
                encoding = next(encodings)
                labelled.append(
                    Labelled(
                        np.array(encoding.ids, dtype=self.dtype),
                        marked(encoding, one.spans),
                        one.unscored,
                        one.altered,
                    )
                )
            else:
                labelled.append(one)
        return labelled

    def spans(self, messages: list[Message]) -> "Spans | Bad":
        """The text of a conversation, and where in it the answers are."""
        for i, message in enumerate(messages):
            if found := self.spelled.search(message.text):
                return Bad("spells", f"message {i + 1} has {found[0]!r}")
        try:
            return self.by_marks(messages) if self.has_marks else self.by_prefixes(messages)
        except Refused as refused:
            return Bad("template", str(refused))

    def by_marks(self, messages: list[Message]) -> "Spans":
        """What the template marks, and the special token behind a mark that has none in it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            made: Any = render_jinja_template(
                [theirs(messages)],
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # as above
            raise refused_by(error) from None
        (text,), (marks,) = made
        answers = [message.text.strip() for message in messages if message.role == "assistant"]
        spans = [(begin, self.end_of_mark(text, begin, end)) for begin, end in marks if begin < end]
        learned = [is_scored(message) for message in messages if message.role == "assistant"]
        if not all(learned):
            if len(spans) != len(learned):
                raise Refused("its marks do not tell which answer is not to be learned")
            answers = [answer for answer, scored in zip(answers, learned, strict=True) if scored]
            spans = [span for span, scored in zip(spans, learned, strict=True) if scored]
        altered = sum(
            answer not in text[begin:end]
            for answer, (begin, end) in zip(answers, spans, strict=False)
        )
        return Spans(
            text,
            spans,
            max(0, len(answers) - len(spans)),
            altered if len(answers) == len(spans) else 0,
        )

    def end_of_mark(self, text: str, begin: int, end: int) -> int:
        """Where a mark ends: at its last special token, if only blanks follow; else at one right behind the mark."""
        inside = max(
            (found.end() for found in self.spelled.finditer(text, begin, end)), default=end
        )
        if inside < end and not text[inside:end].isspace():
            inside = end
        behind = (
            None
            if inside < end or text[begin:end].endswith(self.endings)
            else self.spelled.match(text, end)
        )
        return behind.end() if behind else inside

    def by_prefixes(self, messages: list[Message]) -> "Spans":
        whole, spans, unscored, altered = self.written(messages), [], 0, 0
        for i, message in enumerate(messages):
            if not is_scored(message):
                continue
            is_last = i == len(messages) - 1
            before = self.written(messages[:i], reply=True)
            after = whole if is_last else self.written(messages[: i + 1])
            if is_last and not after.startswith(before):
                k = same_for(before, after)
                raise Refused(
                    f"it asks for a reply with {before[k : k + SHOWN]!r} where an answer that is there is "
                    f"written {after[k : k + SHOWN]!r}, so that no answer begins as a reply does"
                )
            end = self.end_of_answer(message.text, whole, before, after)
            if end is None:
                unscored += 1
                continue
            spans.append((len(before), end))
            altered += message.text.strip() not in whole[len(before) : end]
        return Spans(whole, spans, unscored, altered)

    def end_of_answer(self, answer: str, whole: str, before: str, after: str) -> int | None:
        """Where in the whole the last special token of an answer ends, or the answer where it has none; None where the
        whole goes another way than `after` before that."""
        if not after.startswith(before) or not whole.startswith(before):
            return None
        shared = len(after) if whole.startswith(after) else same_for(whole, after)
        ends = [found.end() for found in self.spelled.finditer(after, len(before), shared)]
        if shared == len(after):
            return ends[-1] if ends else shared
        # some write an end of the whole conversation, too, behind the last answer
        return ends[-1] if ends and answer.strip() in after[len(before) : ends[-1]] else None


def is_scored(message: Message) -> bool:
    """Tell whether a message is an answer that is learned from."""
    return message.role == "assistant" and not isinstance(message, Unlearned)


class Refused(Exception):
    """A template does not write a conversation, or not so that its answer could be scored; the message is why."""


def same_for(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    return next(
        (k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def refused_by(error: Exception) -> Refused:
    return Refused(f"the template says: {' '.join(str(error).split())[:200]}")


class Spans(NamedTuple):
    """The text of a conversation, and the characters from and to which its answers go."""

    text: str
    spans: list[tuple[int, int]]
    unscored: int
    altered: int


def theirs(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.text} for message in messages]


def digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
