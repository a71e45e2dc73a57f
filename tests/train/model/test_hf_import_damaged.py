"""Weights of others in files that are damaged, missing or pickles: refused in a sentence, and no pickle is run."""

import json
import os
import pickle
import re
from collections.abc import Callable

import pytest

from tests.train.model.test_hf_import import CPU, LLAMA, llama, problems, published
from tests.train.model.test_model import recipe
from train.model import hf_import
from train.model.hf_import import ForeignError
from train.model.model import build

__all__ = ["llama"]  # a fixture

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
PAGE = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"
DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "it starts with b''"),
    "cut": (lambda content: content[:-100], "it starts with"),
    "longer": (lambda content: content + b"x", "it starts with"),
    "page": (lambda _: PAGE, "a web or error page"),
    "pointer": (lambda _: POINTER, "a git-lfs pointer"),
    "no JSON": (lambda content: content[:9] + b"\xff" + content[10:], "it starts with"),
    "huge header": (lambda content: (2**62).to_bytes(8, "little") + content[8:], "it starts"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_named_with_what_it_is(llama, name):
    c, folder = llama
    path = folder / WEIGHTS
    damage, words = DAMAGES[name]
    path.write_bytes(damage(path.read_bytes()))
    for read in (lambda: hf_import.check(folder, c), lambda: hf_import.load(folder, build(c, CPU))):
        with pytest.raises(ForeignError) as raised:
            read()
        assert str(raised.value).startswith(f"{path}: is damaged or incomplete: ")
        assert words in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [PAGE, b"[1]", b"\xff", b"[" * 10**6], ids=lambda c: str(c)[:9])
def test_a_config_that_is_none_is_named(llama, content):
    c, folder = llama
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ForeignError, match=re.escape(f"{folder}/config.json: ")):
        hf_import.check(folder, c)


def test_shards_must_be_there_and_lie_in_the_folder(tiny, tmp_path):
    c = recipe(tiny, **LLAMA)
    published(tmp_path, c, max_shard_size="100KB")
    places = json.loads((tmp_path / INDEX).read_text())["weight_map"]

    def refuse(words, name):
        (tmp_path / INDEX).write_text(
            json.dumps({"weight_map": places | {"model.norm.weight": name}})
        )
        with pytest.raises(ForeignError, match=words):
            hf_import.check(tmp_path, c)

    first = min(places.values())
    (tmp_path / first).rename(tmp_path / "elsewhere")
    refuse(rf"lacks {first}, which model\.safetensors\.index\.json names", first)
    for bad in ("../outside.safetensors", "/etc/passwd", "pytorch_model.bin", 3, None):
        refuse("has no weight_map that names safetensors files next to it", bad)
    for name in (first, "twice.safetensors"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    refuse("holds .*, and so does ", "twice.safetensors")


class Bomb:
    """What writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pytorch_model.bin", "Pickles (.bin, .pt) are not read"),
        ("__0_0.distcp", "Pickles (.bin, .pt) are not read"),
        (WEIGHTS, ""),
        ("config.json", ""),
    ],
)
def test_a_pickle_is_never_run(llama, tmp_path, name, words):
    c, folder = llama
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    if name != "config.json":
        (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(bomb)
    with pytest.raises(ForeignError, match=re.escape(name)) as raised:
        hf_import.check(folder, c)
    assert words in str(raised.value)
    assert not (tmp_path / "ran").exists()
    pickle.loads(bomb)
    assert (tmp_path / "ran").exists()  # it would have run


def test_a_folder_without_weights_says_what_it_holds(llama, tmp_path):
    c, folder = llama
    (folder / WEIGHTS).rename(folder / "consolidated.safetensors")
    with pytest.raises(ForeignError, match=r"holds neither .* but config\.json, consolidated\.saf"):
        hf_import.check(folder, c)
    (folder / WEIGHTS).symlink_to(tmp_path / "nowhere")
    with pytest.raises(ForeignError, match=r"model\.safetensors: cannot be read \(No such file"):
        hf_import.check(folder, c)
    (found,) = problems(tmp_path / "absent", c)
    assert "There is no such folder" in found
