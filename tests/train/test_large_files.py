"""A small file of terabytes, which has no content, is refused by its name and never loaded."""

import pytest

from record import status
from record.run_paths import RunPaths
from settings import ROOT, ExpectedError
from settings.init_from import read_json
from settings.resolve import resolve
from settings.resume import read_run_config
from train.data import manifest, tokenizer
from train.data.sources import source
from train.run_folder import has_content

READERS = {
    "config.json": read_run_config,
    "model/config.json": read_json,
    "manifest.json": lambda path: manifest.read_manifest(path.parent),
    "tokenizer.json": tokenizer.load,
    "text.toml": lambda path: source.declared("text", [path.parent]),
    "settings.env": lambda path: resolve({"ENV_FILE": str(path)}, ROOT).check(),
}


def make_endless(path):
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb") as file:
        file.truncate(3 * 10**12)
    return path


@pytest.mark.parametrize("name", READERS)
def test_a_small_file_of_terabytes_is_refused_by_its_name(tmp_path, name):
    path = make_endless(tmp_path / name)
    with pytest.raises(ExpectedError) as refusal:
        READERS[name](path)
    assert path.name in str(refusal.value)
    assert "is larger than 256 MiB, so it is damaged" in str(refusal.value)


def test_a_status_of_terabytes_is_passed_over_with_a_remark(tmp_path):
    paths = RunPaths(tmp_path)
    make_endless(paths.status)
    assert status.read(paths.status) == {}
    assert "is larger than 256 MiB" in status.look_up(paths)[1]


def test_a_tokenizer_of_terabytes_in_a_run_folder_is_another_one(tmp_path):
    assert not has_content(make_endless(tmp_path / "tokenizer.json"), b"{}")
