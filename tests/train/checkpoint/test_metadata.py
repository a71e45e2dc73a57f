"""train/checkpoint/metadata.py: a checkpoint's list of tensors is read, and code in its place is not run."""

import io
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from export.stored import Weights
from tests.train.checkpoint.test_checkpoint import trained, write
from train.checkpoint import checkpoint, manifest, metadata
from train.checkpoint.manifest import CheckpointError


class Touches:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def hostile(victim):
    """Name -> what somebody might put in the place of .metadata."""
    listed = dcp.Metadata({"model.w": Touches(victim)})  # type: ignore[dict-item]
    entry = dcp.Metadata({"model.w": dcp.metadata.BytesStorageMetadata()})
    return {
        "a call": pickle.dumps(Touches(victim)),
        "a call of the first protocol": pickle.dumps(Touches(victim), protocol=0),
        "a call inside the list": pickle.dumps(listed),
        "eval by its name": b"cbuiltins\neval\n(V1\ntR.",
        "a function of an allowed module": b"ctorch\nload\n(Vx\ntR.",
        "an attribute of an allowed class": pickle.dumps(dcp.Metadata.__init__, protocol=4),
        "an entry that DCP would unpickle": pickle.dumps(entry),
        "no list": pickle.dumps({"model.w": 1}),
        "nothing": b"",
    }


NAMES = list(hostile(Path()))


@pytest.fixture
def saved(tiny, tmp_path):
    return write(tmp_path, 1, tiny)


def readers(config):
    """Everything that reads a checkpoint's tensors."""
    model, optimizer = trained(config, 0)
    return {
        "resume": lambda folder: checkpoint.load_into(folder, model, optimizer),
        "sample and eval": lambda folder: checkpoint.load_into(folder, model),
        "export": lambda folder: Weights(folder),
    }


@pytest.mark.parametrize("name", NAMES)
def test_no_code_in_the_place_of_the_list_is_run(saved, tiny, tmp_path, name):
    victim = tmp_path / "victim"
    (saved / ".metadata").write_bytes(hostile(victim)[name])
    content = manifest.load_manifest(saved)
    content["files"][".metadata"] = manifest.describe(saved / ".metadata")
    (saved / "MANIFEST.json").write_bytes(manifest.seal_manifest(content))
    manifest.verify(saved)  # who writes the pickle writes its hashes too
    for what, read in readers(tiny).items():
        with pytest.raises(CheckpointError, match=r"\.metadata|EOFError|input"):
            read(saved)
        assert not victim.exists(), what


class ByName:
    """A member of an enumeration, as Python 3.11.2 pickles it."""

    def __init__(self, kind, name):
        self.arguments = kind, name

    def __reduce__(self):
        return getattr, self.arguments


def test_a_memory_format_is_read_however_python_wrote_it_and_no_other_attribute():
    kinds = dcp.metadata._MEM_FORMAT_ENCODING
    member = kinds.TORCH_CONTIGUOUS_FORMAT
    for content in (pickle.dumps(member), pickle.dumps(ByName(kinds, member.name))):
        assert metadata.MetadataUnpickler(io.BytesIO(content)).load() is member
    for kind, name in ((kinds, "__class__"), (dcp.Metadata, "__init__"), (torch.Size, "numel")):
        content = pickle.dumps(ByName(kind, name))
        with pytest.raises(metadata.ForbiddenPickle, match=name):
            metadata.MetadataUnpickler(io.BytesIO(content)).load()


def test_the_list_is_read_as_torch_reads_it(saved):
    own, theirs = (
        reader(saved).read_metadata() for reader in (metadata.Reader, dcp.FileSystemReader)
    )
    assert own.state_dict_metadata == theirs.state_dict_metadata
    assert own.storage_data == theirs.storage_data
    assert len(own.state_dict_metadata) > 10
