"""train/checkpoint/metadata.py: a checkpoint's list of tensors is read, and code in its place is not run."""

import os
import pickle
import re
import socket
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from export.stored import Weights
from tests import metadata_pickle
from tests.train.checkpoint.test_checkpoint import trained, write
from tests.train.checkpoint.test_find import make
from train.checkpoint import checkpoint, manifest, metadata, tensor_list
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
        "a key that holds another twice, and so on": b"}K\x00" + 60 * b"2\x86" + b"K\x01s.",
        "a key that is nested deeply": b"}K\x00" + 10**6 * b"\x85" + b"K\x01s.",
        "a key that is a set": b"}(K\x01\x91K\x01s.",
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


def reseal(folder, *without):
    """Give a checkpoint a manifest of the files that it has now, but for some."""
    content = manifest.load_manifest(folder)
    content["files"] = {
        path.name: manifest.describe(folder, path.name)
        for path in folder.iterdir()
        if path.name not in ("MANIFEST.json", *without)
    }
    (folder / "MANIFEST.json").write_bytes(manifest.seal_manifest(content))


@pytest.mark.parametrize("name", NAMES)
def test_no_code_in_the_place_of_the_list_is_run(saved, tiny, tmp_path, name):
    victim = tmp_path / "victim"
    (saved / ".metadata").write_bytes(hostile(victim)[name])
    reseal(saved)  # who writes the pickle writes its hashes too
    for what, read in {"verify": manifest.verify, **readers(tiny)}.items():
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            read(saved)
        assert not victim.exists(), what


@pytest.mark.parametrize("python", metadata_pickle.PATH_OF)
def test_the_list_does_not_depend_on_the_python_that_wrote_it(tmp_path, python):
    listed = metadata_pickle.metadata({"model.w": ("__0_0.distcp", 8)}, python)
    (tmp_path / ".metadata").write_bytes(metadata_pickle.dumps(listed))
    tensor = tensor_list.StoredTensor("float32", (8,), [((0,), (8,))])
    assert tensor_list.read_tensor_list(tmp_path).tensors == {"model.w": tensor}
    assert metadata.Reader(tmp_path).tensors() == {"model.w": (torch.Size([8]), torch.float32)}


def test_no_path_of_this_machine_is_written(saved):
    content = (saved / ".metadata").read_bytes()
    assert b"pathlib" not in content and saved.parent.name.encode() not in content


PATH = metadata_pickle.Global("pathlib", "PosixPath")
SIZE = metadata_pickle.Global("torch", "Size")
SETS = {  # pickle's BUILD: of a class or a function, whose attributes are for all
    "a method of a path": (PATH, {"rename": 1}),
    "a method of a size": (SIZE, {"numel": 1}),
    "what a function does": (metadata_pickle.Global("builtins", "getattr"), {"__doc__": ""}),
    "how a class is made": (metadata_pickle.KINDS, {"__new__": PATH}),
    "of a call": (PATH("/"), {"rename": 1}),
    "of a data type": (metadata_pickle.Global("torch", "float32"), {"itemsize": 1}),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("slots", [True, False])
def test_no_attribute_of_a_class_is_set(tmp_path, name, slots):
    of, attributes = SETS[name]
    if isinstance(of, tuple):
        of = metadata_pickle.Global(*of)
    state = (None, attributes) if slots else attributes
    hostile = metadata_pickle.Made(of, state, is_new=False)
    before = Path.rename, torch.Size.numel
    content = {"a": hostile, "b": metadata_pickle.metadata({})}
    (tmp_path / ".metadata").write_bytes(metadata_pickle.dumps(content))
    with pytest.raises(tensor_list.ForbiddenPickle):
        tensor_list.read_tensor_list(tmp_path)
    assert before == (Path.rename, torch.Size.numel)
    fresh = metadata_pickle.metadata({"model.w": ("__0_0.distcp", 8)})
    (tmp_path / ".metadata").write_bytes(metadata_pickle.dumps(fresh))
    assert tensor_list.read_tensor_list(tmp_path).files() == {"__0_0.distcp"}


def spoil(change):
    """The list of a tensor of which something was changed."""
    listed = metadata_pickle.metadata({"model.w": ("__0_0.distcp", 8)})
    facts = listed.state["state_dict_metadata"]["model.w"].state
    (storage,) = listed.state["storage_data"].values()
    change(facts, storage.state, listed.state)
    return metadata_pickle.dumps(listed)


def halve(facts, place, root):
    """List the first half twice, which is as many values as the whole."""
    half = metadata_pickle.made(
        "ChunkStorageMetadata",
        {"offsets": metadata_pickle.size(0), "sizes": metadata_pickle.size(4)},
    )
    facts.update(chunks=[half, half])


def overlap(facts, place, root):
    """Two parts of six values each, of a tensor of eight, which has a third of none."""
    chunks = []
    for begin in (0, 2):
        chunks.append(
            metadata_pickle.made(
                "ChunkStorageMetadata",
                {"offsets": metadata_pickle.size(begin), "sizes": metadata_pickle.size(6)},
            )
        )
        index = {"fqn": "model.w", "index": 0, "offset": metadata_pickle.size(begin)}
        stored = {"relative_path": "__0_0.distcp", "offset": 24 * begin, "length": 24}
        root["storage_data"][metadata_pickle.made("MetadataIndex", index)] = metadata_pickle.made(
            "_StorageInfo", stored, f"{metadata_pickle.DCP}.filesystem"
        )
    facts.update(chunks=chunks, size=metadata_pickle.size(12))


def share_bytes(facts, place, root):
    """A second tensor at the bytes of the first."""
    index = {"fqn": "model.v", "index": 0, "offset": metadata_pickle.size(0)}
    stored = metadata_pickle.made("_StorageInfo", place, f"{metadata_pickle.DCP}.filesystem")
    root["storage_data"][metadata_pickle.made("MetadataIndex", index)] = stored
    root["state_dict_metadata"]["model.v"] = root["state_dict_metadata"]["model.w"]


def narrow(facts, place, root):
    """Eight rows of one value each, of a tensor that has two in a row."""
    (index,) = root["storage_data"]
    index.state.update(offset=metadata_pickle.size(0, 0))
    chunk = {"offsets": metadata_pickle.size(0, 0), "sizes": metadata_pickle.size(8, 1)}
    chunks = [metadata_pickle.made("ChunkStorageMetadata", chunk)]
    facts.update(chunks=chunks, size=metadata_pickle.size(8, 2))


def share_chunks(facts, place, root):
    """Many tensors with the same list of parts."""
    for number in range(5):
        root["state_dict_metadata"][f"model.{number}"] = root["state_dict_metadata"]["model.w"]


def doubled(depth):
    """The opcodes of a list that holds another twice, which does so too, and so on."""
    opcodes = b"]q\x00"
    for level in range(depth):
        opcodes += b"0(" + 2 * bytes([ord("h"), level]) + b"lq" + bytes([level + 1])
    return opcodes


DOUBLED = metadata_pickle.Global("torch", "Size")(doubled(60))
LARGE = b"\x8b" + struct.pack("<i", 10**6) + 10**6 * b"\x01"  # a number of 2.4 million digits

SPOILT = {
    "rows that are too short": narrow,
    "a size that holds another twice, and so on": lambda facts, place, root: facts.update(
        size=DOUBLED
    ),
    "a place that holds another twice, and so on": lambda facts, place, root: place.update(
        offset=doubled(60)
    ),
    "a file that holds another twice, and so on": lambda facts, place, root: place.update(
        relative_path=doubled(60)
    ),
    "a type that holds another twice, and so on": lambda facts, place, root: facts.update(
        properties=metadata_pickle.made("TensorProperties", (doubled(60), 0))
    ),
    "a type without end": lambda facts, place, root: facts.update(
        properties=metadata_pickle.made("TensorProperties", ("float" + 5000 * "9", 0))
    ),
    "a size without end": lambda facts, place, root: facts.update(size=metadata_pickle.size(LARGE)),
    "a size of many dimensions": lambda facts, place, root: facts.update(
        size=metadata_pickle.size(*range(900))
    ),
    "the first half twice": halve,
    "parts that overlap": overlap,
    "two tensors at the same bytes": share_bytes,
    "a place before the file": lambda facts, place, root: place.update(offset=-5),
    "a place in words": lambda facts, place, root: place.update(offset="x"),
    "a place that is no number": lambda facts, place, root: place.update(offset=None),
    "a length in words": lambda facts, place, root: place.update(length="x"),
    "fewer bytes than values": lambda facts, place, root: place.update(length=31),
    "a part is missing": lambda facts, place, root: facts.update(chunks=[]),
    "a part that is too small": lambda facts, place, root: facts["chunks"][0].state.update(
        sizes=metadata_pickle.size(7)
    ),
    "a part outside": lambda facts, place, root: facts["chunks"][0].state.update(
        offsets=metadata_pickle.size(1)
    ),
    "no place": lambda facts, place, root: root.update(storage_data={}),
    "another folder": lambda facts, place, root: place.update(relative_path="../x/__0_0.distcp"),
    "an absolute path": lambda facts, place, root: place.update(relative_path="/etc/passwd"),
    "no file of a checkpoint": lambda facts, place, root: place.update(relative_path="config.json"),
    "a size of words": lambda facts, place, root: facts.update(size=metadata_pickle.size("a")),
    "no type": lambda facts, place, root: facts.pop("properties"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_list_that_is_not_whole_is_refused(tmp_path, name):
    (tmp_path / ".metadata").write_bytes(spoil(SPOILT[name]))
    with pytest.raises(tensor_list.ForbiddenPickle):
        tensor_list.read_tensor_list(tmp_path)


def test_tensors_that_share_their_parts_are_counted_before_they_are_read(tmp_path):
    """30,000 tensors with one list of 30,000 parts would be a thousand million of them."""
    (tmp_path / ".metadata").write_bytes(spoil(share_chunks))
    with pytest.raises(tensor_list.ForbiddenPickle, match="all parts"):
        tensor_list.read_tensor_list(tmp_path)


FEW_BYTES = {
    "a bytearray": b"\x96" + struct.pack("<Q", 2**28),
    "bytes": b"\x8e" + struct.pack("<Q", 2**28),
    "text": b"\x8d" + struct.pack("<Q", 2**28),
    "a frame": b"\x95" + struct.pack("<Q", 2**28),
    "a number": b"\x8b" + struct.pack("<i", 2**28),
    "a place in the memo": b"}r" + struct.pack("<I", 2**28) + b".",
}


@pytest.mark.parametrize("name", FEW_BYTES)
def test_a_few_bytes_ask_for_no_memory(tmp_path, name):
    (tmp_path / ".metadata").write_bytes(FEW_BYTES[name])
    tracemalloc.start()
    try:
        with pytest.raises(tensor_list.ForbiddenPickle):
            tensor_list.read_tensor_list(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


MANY_OBJECTS = {
    "lists": b"]",
    "dicts": b"}",
    "marks": b"(",
    "tuples": b"N\x85",
    "tuples of tuples": b"N\x85\x85",
    "sets": b"\x8f",
    "places in the memo": b"]\x94",
}


@pytest.mark.parametrize("name", MANY_OBJECTS)
def test_memory_is_bounded_by_the_size_of_the_list(tmp_path, name):
    size = 2**20
    (tmp_path / ".metadata").write_bytes(MANY_OBJECTS[name] * (size // len(MANY_OBJECTS[name])))
    tracemalloc.start()
    try:
        with pytest.raises(
            tensor_list.ForbiddenPickle, match=r"\.metadata (holds more|is no list)"
        ):
            tensor_list.read_tensor_list(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 40 * size
    finally:
        tracemalloc.stop()


def test_a_list_that_is_too_large_is_not_read(tmp_path):
    (tmp_path / ".metadata").touch()
    os.truncate(tmp_path / ".metadata", tensor_list.MOST_BYTES + 1)
    with pytest.raises(tensor_list.ForbiddenPickle, match="has more than"):
        tensor_list.read_tensor_list(tmp_path)


@pytest.mark.parametrize("begin", [1, 10**9])
def test_a_part_is_inside_its_file(tmp_path, begin):
    folder = make(tmp_path, 1)
    listed = metadata_pickle.metadata({"model.w": ("__0_0.distcp", 250)})
    (place,) = listed.state["storage_data"].values()
    place.state.update(offset=begin)
    (folder / ".metadata").write_bytes(metadata_pickle.dumps(listed))
    reseal(folder)
    with pytest.raises(
        CheckpointError, match=r"\.metadata .*after the 1000 bytes of __0_0\.distcp"
    ):
        manifest.verify(folder)


def test_the_list_is_read_as_torch_reads_it(saved):
    own, theirs = (
        reader(saved).read_metadata() for reader in (metadata.Reader, dcp.FileSystemReader)
    )
    assert own.state_dict_metadata == theirs.state_dict_metadata
    assert own.storage_data == theirs.storage_data
    assert len(own.state_dict_metadata) > 10


# ---- What a manifest lists, and what is there


def write_part(folder, keys):
    """Write a checkpoint anew with some of its tensors, as whoever can write its hashes may."""
    states: dict = {}
    reader = metadata.Reader(folder)
    for key, (size, dtype) in reader.tensors().items():
        if key in keys:
            states[key] = torch.empty(size, dtype=dtype)
    dcp.load(states, storage_reader=reader, no_dist=True)
    for path in folder.iterdir():
        if path.name != "MANIFEST.json":
            path.unlink()
    checkpoint.save_tensors(states, folder, None)
    reseal(folder)


MOMENT = "optimizer.state.layers.0.self_attn.q_proj.weight.exp_avg"
LACKS = {
    "one moment": lambda key: key != MOMENT,
    "the moments of a weight": lambda key: not key.startswith(MOMENT.removesuffix("exp_avg")),
    "all second moments": lambda key: not key.endswith("exp_avg_sq"),
    "all moments": lambda key: not key.startswith("optimizer."),
    "a weight": lambda key: key != "model.layers.0.self_attn.q_proj.weight",
}


@pytest.mark.parametrize("name", LACKS)
def test_a_checkpoint_without_a_tensor_that_training_needs_is_refused_by_name(saved, tiny, name):
    model, optimizer = trained(tiny, 0)
    keys = set(metadata.Reader(saved).tensors())
    assert MOMENT in keys
    kept = {key for key in keys if LACKS[name](key)}
    write_part(saved, kept)
    manifest.verify(saved)  # who writes such a list writes its hashes too
    with pytest.raises(CheckpointError) as raised:
        checkpoint.load_into(saved, model, optimizer)
    missing = keys - kept
    assert "optimizer state" in str(raised.value) or any(
        key in str(raised.value) for key in missing
    )


def test_a_manifest_counts_the_tensors_that_were_written(saved):
    content = manifest.load_manifest(saved) | {"tensors": 10**6}
    (saved / "MANIFEST.json").write_bytes(manifest.seal_manifest(content))
    with pytest.raises(CheckpointError, match="1000000 were written"):
        manifest.verify(saved)


@pytest.mark.parametrize("without", [".metadata", "__0_0.distcp"])
def test_a_manifest_that_does_not_list_a_file_that_is_needed_is_damaged(saved, without):
    reseal(saved, without)
    with pytest.raises(CheckpointError, match=rf"MANIFEST.json .*{re.escape(without)}"):
        manifest.verify(saved)


@pytest.mark.parametrize("name", ["../__0_0.distcp", "/etc/passwd", "..", "a/b", ""])
def test_a_manifest_that_lists_what_is_outside_its_folder_is_damaged(saved, name):
    content = manifest.load_manifest(saved)
    content["files"][name] = content["files"]["__0_0.distcp"]
    (saved / "MANIFEST.json").write_bytes(manifest.seal_manifest(content))
    with pytest.raises(CheckpointError, match="not the name of a file"):
        manifest.verify(saved)


def test_a_file_that_holds_no_tensor_is_not_of_the_checkpoint(saved):
    (saved / "__1_0.distcp").write_bytes(b"")
    reseal(saved)
    manifest.verify(saved)  # of a process that had nothing to write
    (saved / "__1_0.distcp").write_bytes(b"x")
    reseal(saved)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp, which holds no tensor"):
        manifest.verify(saved)


def put_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)
        server.bind(path.name)


IN_ITS_PLACE = {
    "a pipe": os.mkfifo,
    "a socket": put_socket,
    "a folder": Path.mkdir,
    "a link out": lambda path: path.symlink_to(__file__),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "MANIFEST.json"])
@pytest.mark.parametrize("name", IN_ITS_PLACE)
def test_nothing_but_a_regular_file_is_opened(saved, tiny, monkeypatch, file, name):
    monkeypatch.chdir(saved)
    (saved / file).unlink()
    IN_ITS_PLACE[name](saved / file)
    checks = {"verify": manifest.verify}
    if file != "MANIFEST.json":
        checks |= readers(tiny)
        checks["export"] = lambda folder: Weights(folder).read("norm.weight")
    for read in checks.values():
        with pytest.raises(CheckpointError):
            read(saved)
