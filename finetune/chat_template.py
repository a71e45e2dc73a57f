"""A model's own chat template: the text of a conversation, what of it is learned, and what ends a reply.

    messages -> render -> text -> tokenizer -> ids
                            `---> where each reply begins and ends -> scored tokens

The ids are those of transformers' apply_chat_template. Scored is what the assistant generates: its
message and the special token that ends it, not the header that opens it. A reply begins where the
conversation up to it, written as a prompt, ends. A template with `{% generation %}` marks says itself
where a reply begins.

Some templates write a reply differently once another message follows: Qwen3 leaves its thoughts out,
gpt-oss changes the token that ends it. Such a conversation becomes several examples, one for each
reply, and each is written as it is at the moment when the model replies.

One object serves labels, prompts, generation and export, so the token that a model learns to end a
reply with is the token that generation stops at.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from tokenizers import Encoding

from finetune.limits import CPU_S, MEMORY, ends_within_limits, limited_time
from finetune.row_shapes import THOUGHTS, Conversation, Message, Unfit
from settings.resolve import show_path
from train.data.sources.formats import Bad
from train.data.tokenizer import TokenizerError

VERSION = 3  # changes when the same conversations give other ids or scored tokens
REASONS = {
    "template": "the chat template cannot write the conversation",
    "thoughts": "the chat template leaves the thoughts out. Write them into the content as the model "
    "does, or remove the key",
    "tools": "the chat template leaves tool calls or tools out. Take a model whose template writes "
    "them, or remove them",
    "spells": "a message contains the text of a special token, which could end a reply early. Remove "
    "that text, or the row",
}
TOKENIZER_FILES = ("*.jinja", "*/*.jinja", "*token*.json", "vocab*", "merges.txt")
LARGEST_FILE = 2**28  # bytes; tokenizers of 260,000 tokens have 35 MB
GENERATION_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

QUESTION = {"role": "user", "content": "Is it so?"}
REPLY = {"role": "assistant", "content": "It is."}
THOUGHT = "Let me see."
PROBE: list[Message] = [QUESTION, REPLY, {"role": "user", "content": "Why?"}]
CALL = {"name": "look_up", "arguments": {"word": "so"}}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]
CALL_ID = "call00001"  # Mistral's templates ask for nine characters
TOOL_PROBE: list[Message] = [
    QUESTION,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": CALL_ID, "type": "function", "function": CALL}],
    },
    {"role": "tool", "name": "look_up", "tool_call_id": CALL_ID, "content": "thus"},
]


class Labelled(NamedTuple):
    """An example.

    Attributes:
        ids: (n,) uint16 or uint32.
        scored: (n,) bool.
        altered: replies of which the template leaves text out, or writes it differently.
    """

    ids: np.ndarray
    scored: np.ndarray
    altered: int = 0


@dataclasses.dataclass
class Example:
    """The text of an example, and from which to which character its replies go."""

    text: str
    spans: list[tuple[int, int]]
    altered: int


class Refused(Unfit):
    """Why a conversation gives no example."""


class ChatTemplate:
    """The chat template of a model's folder.

    Attributes:
        tokenizer: transformers'.
        stop_token: the special token that ends a reply.
        stop_ids: the ids that end one; a reply that calls a tool may end with another token.
        fingerprint: of everything that decides the labels.
        dtype: of arrays that hold any id.
        remarks: sentences about the template that a user should read.
    """

    def __init__(self, folder: Path, stop_token: str = "", name: str = ""):
        """Read the tokenizer and find out how a reply ends. Raises TokenizerError.

        Args:
            stop_token: ends replies (STOP_TOKEN). Default: what the template ends them with.
            name: what messages call the model. Default: the folder.
        """
        self.name = name or show_path(folder)
        self.tokenizer = read_tokenizer(folder)
        if not getattr(self.tokenizer, "is_fast", False):
            raise TokenizerError(
                f"{self.name}: has no tokenizer.json, which says which token stands for which part of "
                "a text. Choose a model that has one."
            )
        try:
            self.template = str(self.tokenizer.get_chat_template())
        except ValueError:
            raise TokenizerError(
                f"{self.name}: has no chat template, so nothing says how to write a conversation for "
                "it. Choose the model that was tuned to follow instructions, or copy its "
                "chat_template.jinja into this folder."
            ) from None
        added = self.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        self.special_tokens = sorted({token.content for token in added if token.special})
        by_length = sorted(self.special_tokens, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")
        self.has_marks = bool(GENERATION_MARKS.search(self.template))
        is_small = max(self.tokenizer.get_vocab().values()) < 2**16
        self.dtype: type[np.unsignedinteger] = np.uint16 if is_small else np.uint32

        if not ends_within_limits(lambda: self.read_replies(stop_token)):
            file = folder / "chat_template.jinja"
            if not file.is_file():
                file = folder / "tokenizer_config.json"
            raise TokenizerError(
                f"{show_path(file)}: writing two short messages with this chat template took more than "
                f"{CPU_S} s or {MEMORY >> 30} GiB of memory. Choose a model with another template, or "
                "replace this one."
            )
        stop_tokens = self.read_replies(stop_token)
        self.stop_ids = sorted({self.tokenizer.convert_tokens_to_ids(it) for it in stop_tokens})
        self.fingerprint = hash_parts(
            VERSION,
            self.template,
            self.tokenizer.backend_tokenizer.to_str(),
            sorted(map(str, self.tokenizer.special_tokens_map.items())),
            self.endings,
        )
        if "strftime_now" in self.template:
            self.remarks.append(
                "The chat template writes the date, so data prepared on another day differ in it."
            )

    def read_replies(self, stop_token: str) -> list[str]:
        """Find out how replies are written, and return what ends them. Raises TokenizerError."""
        self.remarks: list[str] = []
        try:
            self.endings = self.find_endings(stop_token)
            stop_tokens = [self.special.findall(ending)[-1] for ending in self.endings]
            self.stop_token = stop_tokens[0]
            self.after_reply = self.render([QUESTION, REPLY]).rpartition(REPLY["content"])[2]
            self.thoughts_end = self.find_end_of_thoughts()
            self.check_replies()
        except Refused as refused:
            raise TokenizerError(
                f"{self.name}: nothing can be learned from its chat template: {refused}. Choose a "
                "model with another template, or put one with {% generation %} marks into its folder "
                "as chat_template.jinja."
            ) from None
        return stop_tokens

    # ---- Text

    def render(
        self,
        messages: Sequence[Message],
        reply: bool = False,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """Return the text of a conversation. Raises Refused with the template's own words.

        Args:
            reply: write it as a prompt, up to where the assistant's next message begins.
        """
        try:
            with limited_time():
                text = self.tokenizer.apply_chat_template(
                    [name_thoughts(message) for message in messages],
                    tools=tools,
                    add_generation_prompt=reply,
                    tokenize=False,
                )
            return str(text)
        except MemoryError:
            raise
        except Exception as error:  # a template raises what it likes
            raise Refused("template", f"it says: {shorten(error)}") from None

    def prompt_ids(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Return the ids of a conversation up to where the reply begins. Raises Refused."""
        text = self.render(messages, reply=True, tools=tools)
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens as they are spelled."""
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def read_reply(self, ids: Sequence[int]) -> str:
        """Return what a generated reply says, without thoughts and special tokens."""
        written = list(ids)
        for place, token in enumerate(written):
            if token in self.stop_ids:
                written = written[:place]
                break
        text = self.decode(written).rpartition(self.thoughts_end)[2]
        return self.special.sub("", text).strip()

    # ---- What ends a reply

    def find_endings(self, stop_token: str) -> list[str]:
        """Return what ends a reply, and a reply that calls a tool. Raises TokenizerError."""
        if stop_token and stop_token not in self.special_tokens:
            raise TokenizerError(
                f"STOP_TOKEN={stop_token}: is not a special token of {self.name}. "
                f"Choose one of: {' '.join(self.special_tokens[:20])}"
            )
        endings = [self.find_ending(PROBE)]
        if stop_token and not endings[0].endswith(stop_token):
            return [stop_token]
        if not endings[0]:
            example = self.tokenizer.eos_token or (self.special_tokens or ["</s>"])[0]
            raise TokenizerError(
                f"{self.name}: its chat template ends a reply with no special token, so a model "
                f"trained with it never stops. Name the token that ends one: STOP_TOKEN={example}"
            )
        if "tool_calls" in self.template:
            # It may write calls of another form. Conversations that have some say so.
            with contextlib.suppress(Refused):
                endings.append(self.find_ending(TOOL_PROBE, TOOLS))
        return list(dict.fromkeys(filter(None, endings)))

    def find_ending(self, probe: list[Message], tools: Any = None) -> str:
        """Return the special tokens after a reply, "" if there are none. Raises Refused.

        Args:
            probe: a question, a reply and the message that follows.
        """
        alone = self.render(probe[:2], tools=tools)
        body = alone[: self.end_of_body(alone)]
        at_end = self.special_run(alone, len(body))
        followed = ""
        with contextlib.suppress(Refused):  # some templates take a single turn
            followed = self.render(probe, tools=tools)
        before_next = self.special_run(followed, len(body)) if followed.startswith(body) else []
        shared = at_end[: count_shared(at_end, before_next)]
        # Without a token at the end (GLM), the header of the next message ends a reply.
        return "".join(shared or at_end or before_next[:1])

    def end_of_body(self, text: str) -> int:
        """Return where a text ends but for the special tokens and blanks at its end."""
        body = text.rstrip()
        while tokens := [token for token in self.special_tokens if body.endswith(token)]:
            body = body.removesuffix(max(tokens, key=len)).rstrip()
        return len(body)

    def special_run(self, text: str, begin: int) -> list[str]:
        """Return the special tokens that follow each other there, blanks before them skipped."""
        tokens = []
        place = len(text) - len(text[begin:].lstrip())
        while match := self.special.match(text, place):
            tokens.append(match[0])
            place = match.end()
        return tokens

    def find_end_of_thoughts(self) -> str:
        """Return the text between thoughts and reply, `</think>` where the template has none."""
        prompt = self.render([QUESTION], reply=True)
        alone = self.render([QUESTION, REPLY])
        before_reply = ""
        if alone.startswith(prompt):
            before_reply = alone[len(prompt) :].partition(REPLY["content"])[0].strip()
        with_thoughts = self.render([QUESTION, {**REPLY, THOUGHTS[0]: THOUGHT}])
        between = with_thoughts.partition(THOUGHT)[2].partition(REPLY["content"])[0].strip()
        if before_reply and between:
            shared = count_shared(before_reply[::-1], between[::-1])
            return between[len(between) - shared :] or between
        return between or before_reply or "</think>"

    def ids_inside_reply(self) -> set[int]:
        """Return the tokens that a reply, with thoughts if it can have some, has before its end."""
        text = ""
        for reply in ({**REPLY, THOUGHTS[0]: THOUGHT}, REPLY):
            with contextlib.suppress(Refused):
                text = text or self.render([QUESTION, reply])
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        reply_ids = ids[len(self.prompt_ids([QUESTION])) :]
        return set(itertools.takewhile(lambda token: token not in self.stop_ids, reply_ids))

    def writes_eos_token(self) -> bool:
        """Tell whether prompts contain what the tokenizer names eos_token.

        Another token of that name would then change what the model is asked.
        """
        named = self.tokenizer.eos_token
        prompts = []
        for eos_token in (named, self.stop_token):
            self.tokenizer.eos_token = eos_token
            prompt = ""
            with contextlib.suppress(Refused):  # some templates take a single turn
                prompt = self.render(PROBE, reply=True)
            prompts.append(prompt)
        self.tokenizer.eos_token = named
        return prompts[0] != prompts[1]

    # ---- Labels

    def label(self, conversations: Sequence[Conversation]) -> list[list[Labelled] | Bad]:
        """Return the examples of each conversation, or why it gives none."""
        results = [self.examples(conversation) for conversation in conversations]
        texts = [example.text for one in results if isinstance(one, list) for example in one]
        encodings = iter(self.encode(texts))
        labelled: list[list[Labelled] | Bad] = []
        for one in results:
            if isinstance(one, Bad):
                labelled.append(one)
                continue
            labelled.append([self.mark(example, next(encodings)) for example in one])
        return labelled

    def encode(self, texts: list[str]) -> list[Encoding]:
        if not texts:
            return []
        made = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return list(made.encodings)

    def mark(self, example: Example, encoding: Encoding) -> Labelled:
        """Score the tokens that begin inside a reply.

        A token that begins before one and reaches into it is part of the header: a reply never
        begins inside a token.
        """
        begins = np.array([begin for begin, _ in encoding.offsets], dtype=np.int64)
        scored = np.zeros(len(begins), dtype=bool)
        for begin, end in example.spans:
            scored |= (begins >= begin) & (begins < end)
        return Labelled(np.array(encoding.ids, dtype=self.dtype), scored, example.altered)

    def examples(self, conversation: Conversation) -> list[Example] | Bad:
        """Return the texts of a conversation: one, unless the template rewrites earlier replies."""
        examples: list[Example] = []
        try:
            for number, message in enumerate(conversation.messages):
                self.check_text(number, message)
            for number, message in enumerate(conversation.messages):
                if message["role"] != "assistant" or number in conversation.unlearned:
                    continue
                reply = self.last_reply(conversation.messages[: number + 1], conversation.tools)
                if examples:
                    before = examples[-1]
                    beginning = before.text[: before.spans[-1][1]]
                    if reply.text.startswith(beginning):
                        reply.spans = before.spans + reply.spans
                        reply.altered += before.altered
                        examples.pop()
                examples.append(reply)
        except Refused as refused:
            return refused.bad
        return examples

    def last_reply(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> Example:
        """Return the conversation as it is when its last message is generated. Raises Refused."""
        prompt = self.render(messages[:-1], reply=True, tools=tools)
        if self.has_marks:
            text, spans = self.marked_spans(messages, tools)
            if text.startswith(prompt):  # some mark the header as well
                begins = len(prompt)
                spans = [(max(begin, begins), end) for begin, end in spans if end > begins]
        else:
            text = self.render(messages, tools=tools)
            if not text.startswith(prompt):
                raise Refused("template", differs(prompt, text))
            spans = [(len(prompt), len(text))]
        if not spans:
            raise Refused("template", "its {% generation %} marks leave this reply out")
        body = self.end_of_body(text)
        for ending in self.endings:
            place = text.find(ending, body)
            if place >= 0 and not text[body:place].strip():
                end = place + len(ending)
                break
        else:  # the template leaves it to the next message, or STOP_TOKEN replaces what it has
            text = text.removesuffix(self.after_reply)
            text += self.endings[-1 if messages[-1].get("tool_calls") else 0]
            end = len(text)
        spans = [(begin, min(stop, end)) for begin, stop in spans if begin < end]
        spans[-1] = (spans[-1][0], end)
        reply_text = text[spans[0][0] : end]
        self.check_parts(messages[-1], reply_text)
        content = messages[-1].get("content") or ""
        return Example(text, spans, int(content.strip() not in reply_text))

    def marked_spans(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and what the template marks of its last message. Raises Refused."""
        text, marks = self.render_marks(messages, tools)
        _, earlier = self.render_marks(messages[:-1], tools)
        return text, marks[len(earlier) :] or marks[-1:]

    def render_marks(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation and the spans that its template marks. Raises Refused."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with limited_time():
                made: Any = render_jinja_template(
                    [[name_thoughts(message) for message in messages]],
                    tools=cast(Any, tools),
                    chat_template=self.template,
                    return_assistant_tokens_mask=True,
                    **self.tokenizer.special_tokens_map,
                )
        except MemoryError:
            raise
        except Exception as error:  # as in render
            raise Refused("template", f"it says: {shorten(error)}") from None
        (text,), (marks,) = made
        return text, [(begin, end) for begin, end in marks if begin < end]

    # ---- Checks

    def check_text(self, number: int, message: Message) -> None:
        """Raise Refused if text of a message becomes a special token under transformers."""
        for text in (message.get("content"), message.get(THOUGHTS[0])):
            if match := self.special.search(text or ""):
                raise Refused("spells", f"message {number + 1} contains {match[0]}")

    def check_parts(self, message: Message, reply_text: str) -> None:
        """Raise Refused if the template leaves out what belongs to a reply."""
        thoughts = (message.get(THOUGHTS[0]) or "").strip()
        if thoughts and thoughts not in reply_text:
            raise Refused("thoughts", f"{thoughts[:40]!r} is not in what it writes")
        for call in message.get("tool_calls") or []:
            name = call.get("function", call).get("name", "")
            if name not in reply_text:
                raise Refused("tools", f"the call of {name} is not in what it writes")

    def check_replies(self) -> None:
        """Raise Refused if no reply can be learned, neither without thoughts nor with them."""
        thinking = {**REPLY, THOUGHTS[0]: THOUGHT}
        try:
            reply = self.last_reply([QUESTION, REPLY], None)
        except Refused as refused:
            try:
                reply = self.last_reply([QUESTION, thinking], None)
            except Refused:
                raise refused from None
            self.remarks.append(
                "The chat template asks for a thought before each reply, so conversations need "
                f"{THOUGHTS[0]}. Those without are dropped."
            )
        reply_text = "".join(reply.text[begin:end] for begin, end in reply.spans)
        if REPLY["content"] not in reply_text:
            raise Refused("template", f"it marks {reply_text!r} as the reply {REPLY['content']!r}")
        if self.render([QUESTION], reply=True).endswith(" "):
            self.remarks.append(
                "The chat template ends a prompt with a space, which a tokenizer joins with the first "
                "word of a reply, so the model answers another prompt than it was trained with. Remove "
                "the space from the template."
            )


def read_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer of a folder. No code of the model's runs. Raises TokenizerError."""
    if not (folder / "tokenizer_config.json").is_file():
        raise TokenizerError(
            f"{folder}: has no tokenizer_config.json. Choose a folder that holds a model with its "
            "tokenizer, as `make export` writes it."
        )
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise TokenizerError(
            "The package transformers is not installed. Run: make setup-finetune"
        ) from None
    check_sizes(folder)
    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of many types
        raise TokenizerError(
            f"{folder}: transformers cannot read its tokenizer ({shorten(error)}). Get the model's "
            "folder again."
        ) from error


def check_sizes(folder: Path) -> None:
    """Raise TokenizerError if a file is too large: transformers reads all of it into memory."""
    for pattern in TOKENIZER_FILES:
        for path in folder.glob(pattern):
            if path.is_file() and path.stat().st_size > LARGEST_FILE:
                raise TokenizerError(
                    f"{show_path(path)}: is larger than {LARGEST_FILE >> 20} MiB, which no file of a "
                    "tokenizer is. Get the model's folder again."
                )


def name_thoughts(message: Message) -> Message:
    """Return a message with its thoughts under each name that templates know."""
    thoughts = message.get(THOUGHTS[0])
    if not thoughts:
        return message
    return message | dict.fromkeys(THOUGHTS, thoughts)


def differs(prompt: str, text: str) -> str:
    """Say where a prompt is not how the conversation with its reply begins."""
    place = count_shared(prompt, text)
    return (
        f"it asks for a reply with {prompt[place : place + 40]!r} and writes one as "
        f"{text[place : place + 40]!r}, so no reply begins as it is asked for"
    )


def count_shared(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many characters or tokens two sequences begin with alike."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


def shorten(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def hash_parts(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
