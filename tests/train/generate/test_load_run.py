"""What a run has trained, opened for use: the same weights, the run's own settings, and a sentence where not."""

import contextlib
import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from record.locks import RunFolderError, hold
from record.run_paths import RunPaths
from settings import SettingsError, load_config
from settings.config import Config
from tests.train.checkpoint.test_checkpoint import ALONE, go_on, save, states_of, trained
from tests.train.model.test_hf_import import QWEN, change, logits, published
from tests.train.model.test_model import recipe
from train.checkpoint.identity import Identity
from train.checkpoint.manifest import CheckpointError
from train.data.manifest import DataError
from train.data.tokenizer import TokenizerError, load
from train.generate.load_run import open_trained, settings_of_command
from train.model import model as model_module
from train.model.hf_import import ForeignError


def open_with(given, **command):
    """What a command sees that is given these settings, and whose preset is another than the run's."""
    c = dataclasses.replace(Config(), device="cpu", **command).derived()
    return open_trained(c, ALONE, given=given.split())


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder as the trainer leaves it: settings, checkpoints by step and their weights."""

    config: Config
    folder: Path
    weights: dict[int, dict[str, torch.Tensor]]

    def open(self, given="", **command):
        where = {"runs_dir": self.config.runs_dir, "data_dir": self.config.data_dir}
        return open_with(f"RUN_NAME {given}", **{"run_name": "a-run"} | where | command)

    def store(self, attempt=None, **settings):
        """Change config.json."""
        facts = json.loads((self.folder / "config.json").read_text())
        facts["settings"] |= settings
        facts["attempts"][-1] |= attempt or {}
        (self.folder / "config.json").write_text(json.dumps(facts))


@pytest.fixture
def run(tiny, tmp_path, data):
    where = {"runs_dir": str(tmp_path), "data_dir": data["DATA_DIR"], "device": "cuda"}
    shape = {"n_kv_head": 1, "qk_norm": True, "dtype": "bfloat16", "preset": "tiny"}
    c = dataclasses.replace(tiny, run_name="a-run", tokenizer=data["TOKENIZER"], **where, **shape)
    folder = tmp_path / "a-run"
    model, optimizer = trained(c, 1)
    sha256 = load(Path(c.tokenizer)).sha256
    weights = {}
    for step in (1, 3):
        small = {"data": states_of(step)["data"] | {"tokenizer_sha256": sha256}}
        save(folder / "checkpoints", step, model, optimizer, small | {"guard": {"skips": 2}})
        weights[step] = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        go_on(c, model, optimizer, 2)
    facts = {"settings": c.stored(), "attempts": [{"host": "there"}]}
    (folder / "config.json").write_text(json.dumps(facts))
    return Run(c, folder, weights)


def equal(opened, weights):
    found = dict(opened.model.named_parameters())
    return found.keys() == weights.keys() and all(
        torch.equal(found[name], weights[name]) for name in weights
    )


# ---- A run


def test_the_newest_weights_come_back_to_the_bit_with_the_runs_own_shape(run):
    opened = run.open()
    assert equal(opened, run.weights[3])
    assert not equal(opened, run.weights[1])
    assert (opened.step, opened.tokens) == (3, 3 * run.config.batch_tokens)
    c = opened.config
    assert (c.n_layer, c.qk_norm, c.n_kv_head) == (2, True, 1)
    assert (c.dtype, c.device) == ("bfloat16", "cpu")  # the run's, and the machine's
    assert opened.source == f"{run.folder}/checkpoints/step_0000003"
    assert opened.facts["attempts"] == [{"host": "there"}]
    assert opened.manifest["guard"] == {"skips": 2}
    assert opened.vocabulary.sha256 == opened.manifest["data"]["tokenizer_sha256"]
    assert not opened.model.training
    assert not any(weight.requires_grad for weight in opened.model.parameters())
    assert equal(run.open(step=1), run.weights[1])


@pytest.mark.parametrize(
    ("attempt", "eps"), [({}, 1e-5), ({"norm_eps": 1e-6}, 1e-6)], ids=["ours", "of INIT_FROM"]
)
def test_a_run_keeps_the_epsilon_of_its_norms(run, attempt, eps):
    run.store(attempt, OF_LATER=1)  # which this version does not know
    model = run.open().model
    assert {part.eps for part in model.modules() if isinstance(part, model_module.RMSNorm)} == {eps}


def test_no_moment_is_read(run, monkeypatch):
    from torch.distributed.checkpoint import FileSystemReader

    asked: list[str] = []
    inner = FileSystemReader.read_data

    def read_data(self, plan, planner):
        asked.extend(item.storage_index.fqn for item in plan.items)
        return inner(self, plan, planner)

    monkeypatch.setattr(FileSystemReader, "read_data", read_data)
    source = run.open().source
    assert sorted(asked) == sorted(f"model.{name}" for name in run.weights[3])
    there = FileSystemReader(source).read_metadata().state_dict_metadata
    assert any(name.startswith("optimizer.") for name in there)


def test_one_that_the_trainer_deletes_meanwhile_is_said_to_be_deleted(run, monkeypatch):
    def build(*how, **options):
        shutil.rmtree(run.folder / "checkpoints" / "step_0000003")  # it was verified by now
        return model_module.build(*how, **options)

    monkeypatch.setattr("train.generate.load_run.build", build)
    with pytest.raises(CheckpointError, match=r"step_0000003: was deleted while.*Repeat the com"):
        run.open()


def test_where_the_newest_is_damaged_the_one_before_is_opened_and_a_step_asked_for_is_refused(
    run,
):
    path = run.folder / "checkpoints" / "step_0000003" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    before = sorted(run.folder.rglob("*"))
    assert equal(run.open(), run.weights[1])
    assert sorted(run.folder.rglob("*")) == before  # nothing is set aside
    with pytest.raises(CheckpointError, match=r"step_0000003: __0_0\.distcp is damaged"):
        run.open(step=3)


def remove(run, pattern):
    for path in list(run.folder.glob(pattern)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    ("spoil", "command", "error", "words"),
    [
        (None, {"run_name": "other"}, RunFolderError, "There is no run other in .* set INIT_FROM"),
        (None, {"step": 2}, SettingsError, "STEP=2: Run a-run has no .*There are: 3, 1"),
        ("checkpoints", {}, CheckpointError, "run a-run has no checkpoint yet"),
        ("checkpoints/*/MANIFEST.json", {}, CheckpointError, "no valid checkpoint"),
        ("config.json", {}, RunFolderError, r"config\.json: is missing, but the run has check"),
        ({"N_LAYER": "many"}, {}, RunFolderError, r"config\.json: N_LAYER has a value that"),
        ({"TOKENIZER": "/x.json"}, {}, TokenizerError, r"step_0000003 is missing: /x\.json: cann"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_what_is_missing_or_damaged_is_named(run, spoil, command, error, words):
    if isinstance(spoil, str):
        remove(run, spoil)
    run_settings = spoil if isinstance(spoil, dict) else {}
    if run_settings:
        run.store(**run_settings)
    with pytest.raises(error, match=words):
        run.open(**command)


def test_settings_that_disagree_with_the_run_are_refused_and_others_are_the_commands(
    run,
):
    changes = {"n_layer": 4, "seq_len": 64, "n_embd": 32, "doc_mask": True}
    with pytest.raises(SettingsError) as raised:
        run.open("N_LAYER SEQ_LEN N_EMBD DOC_MASK", **changes)
    assert raised.value.problems == [
        f"{name}={now}: The run a-run has {name}={then}. Leave {name} out, or choose another RUN_NAME."
        for name, now, then in (("DOC_MASK", 1, 0), ("N_LAYER", 4, 2), ("SEQ_LEN", 64, 32))
    ]
    own = {"seed": 5, "micro_batch_size": 3, "learning_rate": 0.5}
    c = run.open("SEED MICRO_BATCH_SIZE LEARNING_RATE", **own, eval_minutes=7.0).config
    assert (c.seed, c.micro_batch_size, c.eval_minutes) == (5, 3, 7.0)
    assert c.learning_rate == run.config.learning_rate
    c = run.open(**own).config  # of another preset, and not given
    assert (c.seed, c.micro_batch_size) == (run.config.seed, run.config.micro_batch_size)


def test_the_tokenizer_is_known_by_its_hash(run, tmp_path):
    """The run's own copy, or one that has moved; another one in its place is refused."""
    content = Path(run.config.tokenizer).read_bytes()
    run.store(TOKENIZER=str(tmp_path / "gone.json"))
    other = tmp_path / "other.json"
    for text, is_right in ((content, True), (content + b"\n", False)):
        for path, how in (
            (other, {"given": "TOKENIZER", "tokenizer": str(other)}),
            (run.folder / "tokenizer.json", {}),
        ):
            path.write_bytes(text)
            if is_right:
                assert run.open(**how).vocabulary.content == content
            else:
                with pytest.raises(TokenizerError, match="was trained with another tokenizer"):
                    run.open(**how)


# ---- A folder of Hugging Face's


@pytest.fixture
def folder(tiny, tmp_path, data):
    return publish(tmp_path / "qwen", data, recipe(tiny, **QWEN))


def publish(place, data, c):
    published(place, c, max_shard_size="100KB")
    shutil.copy(data["TOKENIZER"], place / "tokenizer.json")
    return c, place


def of_folder(place, given="", **command):
    where = {"init_from": str(place), "runs_dir": str(place.parent)}
    return open_with(f"INIT_FROM {given}", **where, **command)


def test_a_foreign_folder_tells_its_own_shape_and_tokenizer(folder):
    from transformers import AutoModelForCausalLM

    c, place = folder
    opened = of_folder(place)
    theirs = AutoModelForCausalLM.from_pretrained(place)
    torch.testing.assert_close(logits(opened.model, c), logits(theirs, c), rtol=1e-5, atol=1e-5)
    assert (opened.step, opened.tokens, opened.facts, opened.source) == (0, 0, {}, str(place))
    longest = theirs.config.max_position_embeddings
    assert opened.config.seq_len == opened.model.rotary.shape[1] == longest
    assert opened.vocabulary.size == 512
    assert of_folder(place, "SEQ_LEN", seq_len=16).config.seq_len == 16
    assert of_folder(place, "N_LAYER", n_layer=2).config.n_layer == 2


def test_rows_that_no_file_holds_are_zero(tiny, tmp_path, data):
    _, place = publish(tmp_path / "llama", data, recipe(tiny, vocab_size=513))
    weight = of_folder(place).model.embed_tokens.weight
    assert len(weight) == 640
    assert not weight[513:].any()


@pytest.mark.parametrize(
    ("spoil", "given", "command", "error", "words"),
    [
        (None, "TOKENIZER", {"tokenizer": "train"}, SettingsError, "INIT_FROM has its own"),
        (shutil.rmtree, "", {}, SettingsError, "There is no such folder"),
        (lambda at: (at / "tokenizer.json").unlink(), "", {}, TokenizerError, "qwen is missing: "),
        (lambda at: change(at, model_type="gpt2"), "", {}, SettingsError, "must be llama or qwen3"),
        (lambda at: (at / "config.json").unlink(), "", {}, ForeignError, r"config\.json: is missi"),
    ],
)
def test_what_is_wrong_with_a_foreign_folder_is_said(
    folder,
    spoil,
    given,
    command,
    error,
    words,
):
    if spoil:
        spoil(folder[1])
    with pytest.raises(error, match=words):
        of_folder(folder[1], given, **command)


def test_a_vocabulary_larger_than_the_table_is_refused(tiny, tmp_path, data):
    _, place = publish(tmp_path / "llama", data, recipe(tiny, vocab_size=501))
    with pytest.raises(DataError, match="the tokenizer has 512 entries, but VOCAB_SIZE=501"):
        of_folder(place)


def test_all_that_does_not_fit_a_foreign_folder_is_said_at_once(
    folder,
):
    _, place = folder
    longest = json.loads((place / "config.json").read_text())["max_position_embeddings"]
    with pytest.raises(SettingsError) as raised:
        of_folder(place, "N_LAYER SEQ_LEN", n_layer=7, seq_len=2 * longest, step=4)
    names = [problem.split(":")[0] for problem in raised.value.problems]
    assert names == ["STEP=4", f"SEQ_LEN={2 * longest}", "N_LAYER=7"]


def test_a_run_and_a_folder_of_weights(run, folder):
    """A folder asked for by name is opened though the preset's run is there; one that a run named was not trained from
    is refused."""
    init_from = str(folder[1])
    shutil.copytree(run.folder, run.folder.parent / "tiny")
    assert of_folder(folder[1]).source == init_from
    with pytest.raises(SettingsError, match=r"INIT_FROM=.*qwen: The run a-run has INIT_FROM=\."):
        run.open("INIT_FROM", init_from=init_from)
    run.store(INIT_FROM=init_from)
    assert run.open("INIT_FROM", init_from=init_from).step == 3


def test_rules_about_steps_do_not_keep_a_command_from_looking_at_a_model():
    environ = {"ENV_FILE": "", "MICRO_BATCH_SIZE": "7", "PATH": os.environ["PATH"]}
    with pytest.raises(SettingsError):
        load_config(environ)
    assert settings_of_command(environ)[0].micro_batch_size == 7


@pytest.mark.parametrize("is_running", [True, False])
def test_a_run_without_a_checkpoint_is_not_called_unknown(run, is_running):
    """It prepares its data, say, and has no config.json yet."""
    (run.folder / "config.json").unlink()
    shutil.rmtree(run.folder / "checkpoints")
    paths = RunPaths(run.folder)
    paths.status.write_text("{}")
    works = hold(paths.job, "works on this run") if is_running else contextlib.nullcontext()
    unsaved = pytest.raises(CheckpointError, match="run a-run has no checkpoint yet")
    with works, unsaved as raised:
        run.open()
    assert ("make stop RUNS_DIR=" in str(raised.value)) == is_running


def test_a_run_that_was_not_evaluated_can_be_measured(run):
    run.store(EVAL_TOKENS=0)
    assert run.open().config.eval_tokens == 65536


def test_a_checkpoint_of_another_run_is_not_taken_for_this_ones(run):
    facts = json.loads((run.folder / "config.json").read_text())
    facts["identity"] = Identity.of({}, run.config).stored() | {"adopted": []}
    (run.folder / "config.json").write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match="of another run"):
        run.open()
