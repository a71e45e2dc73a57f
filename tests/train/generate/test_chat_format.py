"""Conversations as transformers writes them by the Jinja template, and by hand."""

import json

import pytest
from tokenizers import Tokenizer

from export import files
from train.data import tokenizer
from train.data.tokenizer import TokenizerError, Vocabulary, load
from train.generate import chat_format
from train.generate.chat_format import CHATML, OWN, format_of

TALKS = [
    [("user", "Hi")],
    [("system", "Be brief. "), ("user", " What\nis 1+1?"), ("assistant", "\n\n2"), ("user", "")],
    [("user", "it's 'quoted' {{ x }} \\n"), ("assistant", "\u00e9t\u00e9  \n")],
]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    texts = (f"user system word{i} " * 5 for i in range(400))
    return tokenizer.train(texts, 512, tmp_path_factory.mktemp("own") / "tokenizer.json")


def renamed(v, path, **names):
    """The same with other special tokens."""
    text = v.tokenizer.to_str()
    for old, new in names.items():
        text = text.replace(json.dumps(f"<|{old}|>"), json.dumps(new))
    path.write_text(text)
    return load(path)


@pytest.fixture(scope="module")
def chatml(own, tmp_path_factory):
    return renamed(
        own,
        tmp_path_factory.mktemp("chatml") / "tokenizer.json",
        system="<|im_start|>",
        end="<|im_end|>",
    )


def write_by_hand(made, talk, reply):
    """Return a conversation as text, special tokens included."""
    text = made.begin
    for role, content in talk:
        text += made.opening.format(role) + made.heading.format(role)
        text += content + made.end + made.behind
    if reply:
        text += "<|assistant|>" if made is OWN else "<|im_start|>assistant\n"
    return text


@pytest.mark.parametrize("kind", ["own", "chatml"])
@pytest.mark.parametrize("talk", TALKS, ids=["a question", "a talk", "odd characters"])
@pytest.mark.parametrize("reply", [False, True])
def test_the_template_in_transformers_writes_what_is_written_by_hand(request, kind, talk, reply):
    from transformers import PreTrainedTokenizerFast

    v: Vocabulary = request.getfixturevalue(kind)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(v.tokenizer.to_str()),
        chat_template=format_of(v).template,
    )
    messages = [{"role": role, "content": text} for role, text in talk]
    found = theirs.apply_chat_template(messages, add_generation_prompt=reply, tokenize=False)
    assert found == write_by_hand(format_of(v), talk, reply)


def test_by_hand(own, chatml):
    for v, made, tokens in (
        (own, OWN, "<|endoftext|><|system|><|user|><|assistant|><|end|>"),
        (chatml, CHATML, "<|im_start|><|im_end|>"),
    ):
        assert format_of(v) is made
        assert "".join(made.tokens) == tokens
        assert v.decode(files.chat_of(v)[1]) == made.end


def test_a_tokenizer_without_them_is_refused_with_what_it_lacks(own, tmp_path):
    bare = renamed(own, tmp_path / "t.json", user="<|a|>", end="<|b|>")
    with pytest.raises(
        TokenizerError, match=r"it lacks <\|user\|> <\|end\|>; or for ChatML <\|im_start\|> <\|im"
    ):
        format_of(bare)


def test_another_role_is_refused():
    import jinja2

    def fail(text):
        raise ValueError(text)

    template = jinja2.Environment().from_string(
        chat_format.OWN.template, globals={"raise_exception": fail}
    )
    with pytest.raises(ValueError, match="a message has the role tool"):
        template.render(messages=[{"role": "tool", "content": "a"}])
