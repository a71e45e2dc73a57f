"""Weights of others in files that are damaged, missing or pickles: refused in a sentence, and no pickle is run."""

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from settings.config import Config
from tests.train.model.test_hf_import import CPU, LLAMA, llama, problems, published
from tests.train.model.test_model import recipe
from train.model import hf_import
from train.model.hf_import import ForeignError
from train.model.model import build

__all__ = ["llama"]  # a fixture


NORM = "model.norm.weight"
PAGE = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"
PAGE_OR_POINTER = {"page": "a web or error page", "pointer": "a git-lfs pointer"}
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda content: content[:-100],
    "longer": lambda content: content + b"x",
    "page": lambda _: PAGE,
    "pointer": lambda _: POINTER,
    "no JSON": lambda content: content[:9] + b"\xff" + content[10:],
    "huge header": lambda content: (2**62).to_bytes(8, "little") + content[8:],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_named_with_what_it_is(llama: tuple[Config, Path], name: str) -> None:
    c, folder = llama
    path = folder / "model.safetensors"
    path.write_bytes(DAMAGES[name](path.read_bytes()))
    for read in (lambda: hf_import.check(folder, c), lambda: hf_import.load(folder, build(c, CPU))):
        with pytest.raises(ForeignError) as raised:
            read()
        assert str(raised.value).startswith(f"{path}: is damaged or incomplete: ")
        assert PAGE_OR_POINTER.get(name, "it starts with") in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "content", [b"", PAGE, b"[1]", b"{", b"\xff", b"[" * 10**6, None], ids=lambda c: str(c)[:9]
)
def test_a_config_that_is_none_is_named(llama: tuple[Config, Path], content: bytes | None) -> None:
    c, folder = llama
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_bytes(content)
    with pytest.raises(ForeignError, match=re.escape(f"{folder}/config.json: ")):
        hf_import.check(folder, c)


def test_shards_must_be_there_and_lie_in_the_folder(tiny: Config, tmp_path: Path) -> None:
    c = recipe(tiny, **LLAMA)
    published(tmp_path, c, max_shard_size="100KB")
    index = tmp_path / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    first = sorted(set(places["weight_map"].values()))[0]
    (tmp_path / first).rename(tmp_path / "elsewhere")
    with pytest.raises(
        ForeignError, match=rf"lacks {first}, which model\.safetensors\.index\.json names"
    ):
        hf_import.check(tmp_path, c)
    for bad in ("../outside.safetensors", "/etc/passwd", "pytorch_model.bin", 3, None):
        index.write_text(json.dumps({"weight_map": places["weight_map"] | {NORM: bad}}))
        with pytest.raises(
            ForeignError, match="has no weight_map that names safetensors files next to it"
        ):
            hf_import.check(tmp_path, c)
    (tmp_path / first).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "twice.safetensors").symlink_to(tmp_path / "elsewhere")
    index.write_text(json.dumps({"weight_map": places["weight_map"] | {NORM: "twice.safetensors"}}))
    with pytest.raises(ForeignError, match=r"holds .*, and so does "):
        hf_import.check(tmp_path, c)


class Bomb:
    """What writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "model.pt",
        "consolidated.00.pth",
        "__0_0.distcp",
        "model.safetensors",
        "config.json",
    ],
)
def test_a_pickle_is_never_run(llama: tuple[Config, Path], tmp_path: Path, name: str) -> None:
    c, folder = llama
    if name != "config.json":
        (folder / "model.safetensors").unlink()
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    (folder / name).write_bytes(bomb)
    with pytest.raises(ForeignError) as raised:
        hf_import.check(folder, c)
    assert name in str(raised.value)
    if not name.endswith(("json", "safetensors")):
        assert "Pickles (.bin, .pt) are not read" in str(raised.value)
    assert not (tmp_path / "ran").exists()
    pickle.loads(bomb)
    assert (tmp_path / "ran").exists()  # it would have run


def test_a_folder_without_weights_says_what_it_holds(
    llama: tuple[Config, Path], tmp_path: Path
) -> None:
    c, folder = llama
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    with pytest.raises(
        ForeignError, match=r"holds neither .* but config\.json, consolidated\.safetensors"
    ):
        hf_import.check(folder, c)
    (folder / "consolidated.safetensors").unlink()
    with pytest.raises(
        ForeignError, match=r"holds neither model\.safetensors .*, but config\.json"
    ):
        hf_import.check(folder, c)
    (folder / "model.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ForeignError, match=r"model\.safetensors: cannot be read \(No such file"):
        hf_import.check(folder, c)
    (found,) = problems(tmp_path / "absent", c)
    assert "There is no such folder" in found
