"""What a run has trained, opened for use: the same weights, the run's own settings, and a sentence where not."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from record.locks import RunFolderError
from settings import SettingsError
from settings.config import Config
from settings.resolve import resolve
from tests.train.checkpoint.test_checkpoint import ALONE, go_on, save, trained
from tests.train.model.test_hf_import import QWEN, change, logits, published
from tests.train.model.test_model import recipe
from train.checkpoint.manifest import CheckpointError
from train.data.manifest import DataError
from train.data.tokenizer import TokenizerError, load
from train.generate.load_run import Trained, open_trained, settings_of_command
from train.model import model as model_module
from train.model.hf_import import ForeignError

RUN = {"RUN_NAME"}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder as the trainer leaves it: settings, checkpoints by step and their weights."""

    config: Config
    folder: Path
    weights: dict[int, dict[str, torch.Tensor]]

    def open(self, given: set[str] = RUN, **command: object) -> Trained:
        """What a command sees whose preset is another than the run's."""
        c = dataclasses.replace(
            Config(),
            runs_dir=self.config.runs_dir,
            run_name=self.config.run_name,
            data_dir=self.config.data_dir,
            device="cpu",
            **command,
        ).derived()
        return open_trained(c, ALONE, given=given)


@pytest.fixture
def run(tiny: Config, tmp_path: Path, data: dict[str, str]) -> Run:
    c = dataclasses.replace(
        tiny,
        runs_dir=str(tmp_path),
        run_name="a-run",
        data_dir=data["DATA_DIR"],
        n_kv_head=1,
        tokenizer=data["TOKENIZER"],
        qk_norm=True,
        dtype="bfloat16",
        device="cuda",
        preset="tiny",
    )
    folder = tmp_path / "a-run"
    model, optimizer = trained(c, 1)
    sha256 = load(Path(c.tokenizer)).sha256
    weights = {}
    for step in (1, 3):
        save(
            folder / "checkpoints",
            step,
            model,
            optimizer,
            {"data": {"step": step, "tokenizer_sha256": sha256, "gaps": []}, "guard": {"skips": 2}},
        )
        weights[step] = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        go_on(c, model, optimizer, 2)
    (folder / "config.json").write_text(
        json.dumps({"settings": c.stored(), "attempts": [{"host": "there"}]})
    )
    return Run(c, folder, weights)


def equal(opened: Trained, weights: dict[str, torch.Tensor]) -> bool:
    found = dict(opened.model.named_parameters())
    return found.keys() == weights.keys() and all(
        torch.equal(found[name], weights[name]) for name in weights
    )


# ---- A run


@pytest.mark.parametrize(
    ("attempt", "settings", "eps"),
    [({}, {}, 1e-5), ({"norm_eps": 1e-6}, {}, 1e-6), ({}, {"NORM_EPS": 1e-3}, 1e-3)],
    ids=["ours", "of INIT_FROM", "of an older version"],
)
def test_a_run_keeps_the_epsilon_of_its_norms(
    run: Run, attempt: dict, settings: dict, eps: float
) -> None:
    facts = json.loads((run.folder / "config.json").read_text())
    facts["attempts"][-1] |= attempt
    facts["settings"] |= settings
    (run.folder / "config.json").write_text(json.dumps(facts))
    model = run.open().model
    assert {part.eps for part in model.modules() if isinstance(part, model_module.RMSNorm)} == {eps}


def test_the_newest_weights_come_back_to_the_bit_with_the_runs_own_shape(run: Run) -> None:
    opened = run.open()
    assert equal(opened, run.weights[3]) and not equal(opened, run.weights[1])
    assert (opened.step, opened.tokens) == (3, 3 * run.config.batch_tokens)
    assert (opened.config.n_layer, opened.config.qk_norm, opened.config.n_kv_head) == (2, True, 1)
    assert (opened.config.dtype, opened.config.device) == (
        "bfloat16",
        "cpu",
    )  # the run's, and the machine's
    assert opened.source == f"{run.folder}/checkpoints/step_0000003"
    assert opened.facts["attempts"] == [{"host": "there"}] and opened.facts["checkpoint"][
        "guard"
    ] == {"skips": 2}
    assert opened.vocabulary.sha256 == opened.facts["checkpoint"]["data"]["tokenizer_sha256"]
    assert not opened.model.training and not any(w.requires_grad for w in opened.model.parameters())


def test_step_asks_for_another_and_one_that_is_not_there_is_named_with_those_that_are(
    run: Run,
) -> None:
    assert equal(run.open(step=1), run.weights[1])
    with pytest.raises(
        SettingsError, match=r"STEP=2: Run a-run has no checkpoint of that step\. There are: 3, 1"
    ):
        run.open(step=2)


def test_no_moment_is_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    asked: list[str] = []
    inner = FileSystemReader.read_data

    def read_data(self, plan, planner):
        asked.extend(item.storage_index.fqn for item in plan.items)
        return inner(self, plan, planner)

    monkeypatch.setattr(FileSystemReader, "read_data", read_data)
    run.open()
    assert sorted(asked) == sorted(f"model.{name}" for name in run.weights[3])
    stored = (
        FileSystemReader(run.folder / "checkpoints" / "step_0000003")
        .read_metadata()
        .state_dict_metadata
    )
    assert any(name.startswith("optimizer.") for name in stored)  # there was some to read


def test_one_that_the_trainer_deletes_meanwhile_is_said_to_be_deleted(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unfilled(*how: object) -> object:
        shutil.rmtree(run.folder / "checkpoints" / "step_0000003")  # it was verified by now
        return model_module.unfilled(*how)

    monkeypatch.setattr("train.generate.load_run.unfilled", unfilled)
    with pytest.raises(
        CheckpointError, match=r"step_0000003: was deleted while it was read.*Repeat the command"
    ):
        run.open()


def test_where_the_newest_is_damaged_the_one_before_is_opened_and_a_step_asked_for_is_refused(
    run: Run,
) -> None:
    path = run.folder / "checkpoints" / "step_0000003" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    before = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert equal(run.open(), run.weights[1])
    assert (
        sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == before
    )  # nothing is set aside
    with pytest.raises(CheckpointError, match=r"step_0000003: __0_0\.distcp is damaged"):
        run.open(step=3)
    for folder in (run.folder / "checkpoints").iterdir():
        (folder / "MANIFEST.json").unlink()
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        run.open()


def test_no_run_and_no_checkpoint_yet(run: Run) -> None:
    with pytest.raises(
        RunFolderError,
        match=r"RUN_NAME=other: there is no such run in .*\. Its runs: a-run\. Choose",
    ):
        open_trained(
            dataclasses.replace(Config(), runs_dir=run.config.runs_dir, run_name="other"),
            ALONE,
            given=RUN,
        )
    shutil.rmtree(run.folder / "checkpoints")
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        run.open()


def test_settings_that_disagree_with_the_run_are_refused_and_others_are_the_commands(
    run: Run,
) -> None:
    changes = {"n_layer": 4, "seq_len": 64, "n_embd": 32, "doc_mask": True}
    with pytest.raises(SettingsError) as raised:
        run.open({*RUN, "N_LAYER", "SEQ_LEN", "N_EMBD", "DOC_MASK"}, **changes)
    assert raised.value.problems == [
        f"{name}: The run a-run has {has}. Leave {name.split('=')[0]} out, or choose another RUN_NAME."
        for name, has in (
            ("DOC_MASK=1", "DOC_MASK=0"),
            ("N_LAYER=4", "N_LAYER=2"),
            ("SEQ_LEN=64", "SEQ_LEN=32"),
        )
    ]
    c = run.open(
        {*RUN, "DTYPE", "SEED", "MICRO_BATCH_SIZE", "LEARNING_RATE"},
        dtype="float32",
        seed=5,
        micro_batch_size=3,
        learning_rate=0.5,
        eval_minutes=7.0,
    ).config
    assert (c.dtype, c.seed, c.micro_batch_size, c.eval_minutes) == ("float32", 5, 3, 7.0)
    assert c.learning_rate == run.config.learning_rate
    c = run.open(seed=5, micro_batch_size=3).config  # of another preset, and not given
    assert (c.seed, c.micro_batch_size) == (run.config.seed, run.config.micro_batch_size)


def test_a_damaged_config_json_is_named_with_the_setting(run: Run) -> None:
    path = run.folder / "config.json"
    kept = json.loads(path.read_text())
    for content, words in (
        ({"settings": {**kept["settings"], "N_LAYER": "many"}}, "N_LAYER has a value that"),
        ({"settings": None}, "is not the config.json"),
        ({"attempts": 3}, "is not the config.json"),
    ):
        path.write_text(json.dumps(kept | content))
        with pytest.raises(RunFolderError, match=rf"config\.json: {words}.*estore.* from a copy"):
            run.open()
    path.write_text(json.dumps(kept | {"settings": {**kept["settings"], "OF_LATER": 1}}))
    assert equal(run.open(), run.weights[3])  # of a setting that this version does not know


def test_without_its_settings_a_run_is_not_used(run: Run) -> None:
    (run.folder / "config.json").unlink()
    with pytest.raises(
        RunFolderError, match=r"config\.json: is missing, but the run has check.*Restore"
    ):
        run.open()


# ---- Its tokenizer


def test_the_tokenizer_is_known_by_its_hash(run: Run, tmp_path: Path) -> None:
    """It may have moved; another one in its place is refused."""
    other, moved = tmp_path / "other.json", tmp_path / "moved.json"
    content = Path(run.config.tokenizer).read_text()
    moved.write_text(content)
    other.write_text(content + "\n")
    facts = json.loads((run.folder / "config.json").read_text())
    facts["settings"]["TOKENIZER"] = str(tmp_path / "gone.json")
    (run.folder / "config.json").write_text(json.dumps(facts))
    with pytest.raises(
        TokenizerError, match=r"step_0000003 is missing: .*gone.json: cannot be read"
    ):
        run.open()
    assert equal(run.open({*RUN, "TOKENIZER"}, tokenizer=str(moved)), run.weights[3])
    with pytest.raises(
        TokenizerError, match=r"TOKENIZER=.*other.json: .* was trained with another tokenizer"
    ):
        run.open({*RUN, "TOKENIZER"}, tokenizer=str(other))


def test_a_run_that_was_copied_elsewhere_has_its_own_tokenizer(run: Run, tmp_path: Path) -> None:
    facts = json.loads((run.folder / "config.json").read_text())
    facts["settings"]["TOKENIZER"] = str(tmp_path / "gone.json")
    (run.folder / "config.json").write_text(json.dumps(facts))
    content = Path(run.config.tokenizer).read_bytes()
    (run.folder / "tokenizer.json").write_bytes(content)
    assert run.open().vocabulary.content == content
    (run.folder / "tokenizer.json").write_bytes(content + b"\n")  # another one
    with pytest.raises(TokenizerError, match="was trained with another tokenizer"):
        run.open()


# ---- A folder of Hugging Face's


@pytest.fixture
def folder(tiny: Config, tmp_path: Path, data: dict[str, str]) -> tuple[Config, Path]:
    c = recipe(tiny, **QWEN)
    published(tmp_path / "qwen", c, max_shard_size="100KB")
    shutil.copy(data["TOKENIZER"], tmp_path / "qwen" / "tokenizer.json")
    return c, tmp_path / "qwen"


def of_folder(folder: Path, given: set[str] | None = None, **command: object) -> Trained:
    c = dataclasses.replace(
        Config(), init_from=str(folder), runs_dir=str(folder.parent), device="cpu", **command
    )
    return open_trained(c.derived(), ALONE, given={"INIT_FROM"} | (given or set()))


def test_a_foreign_folder_tells_its_own_shape_and_tokenizer(folder: tuple[Config, Path]) -> None:
    from transformers import AutoModelForCausalLM

    c, place = folder
    opened = of_folder(place)
    theirs = AutoModelForCausalLM.from_pretrained(place)
    torch.testing.assert_close(logits(opened.model, c), logits(theirs, c), rtol=1e-5, atol=1e-5)
    assert (opened.step, opened.tokens, opened.facts, opened.source) == (0, 0, {}, str(place))
    assert (
        opened.config.seq_len
        == theirs.config.max_position_embeddings
        == opened.model.rotary.shape[1]
    )
    assert opened.vocabulary.size == 512
    assert of_folder(place, {"SEQ_LEN"}, seq_len=16).config.seq_len == 16
    assert of_folder(place, {"N_LAYER"}, n_layer=2).config.n_layer == 2


def test_rows_that_no_file_holds_are_zero(
    tiny: Config, tmp_path: Path, data: dict[str, str]
) -> None:
    c = recipe(tiny, vocab_size=513)
    published(tmp_path / "llama", c)
    shutil.copy(data["TOKENIZER"], tmp_path / "llama" / "tokenizer.json")
    model = of_folder(tmp_path / "llama").model
    assert model.embed_tokens.weight.shape[0] == 640 and not model.embed_tokens.weight[513:].any()


def test_what_is_wrong_with_a_foreign_folder_is_said(
    folder: tuple[Config, Path], tmp_path: Path
) -> None:
    _, place = folder
    longest = json.loads((place / "config.json").read_text())["max_position_embeddings"]
    with pytest.raises(SettingsError) as raised:
        of_folder(place, {"N_LAYER", "SEQ_LEN"}, n_layer=7, seq_len=2 * longest, step=4)
    assert [problem.split(":")[0] for problem in raised.value.problems] == [
        "STEP=4",
        f"SEQ_LEN={2 * longest}",
        "N_LAYER=7",
    ]
    with pytest.raises(SettingsError, match="TOKENIZER=train: INIT_FROM has its own"):
        of_folder(place, {"TOKENIZER"}, tokenizer="train")
    with pytest.raises(SettingsError, match="There is no such folder"):
        of_folder(tmp_path / "nowhere")
    (place / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"qwen is missing: .*tokenizer.json: cannot be read"):
        of_folder(place)
    change(place, model_type="gpt2")
    with pytest.raises(SettingsError, match="must be llama or qwen3"):
        of_folder(place)
    (place / "config.json").unlink()
    with pytest.raises(ForeignError, match=r"config\.json: is missing"):
        of_folder(place)


def test_a_vocabulary_larger_than_the_table_is_refused(
    tiny: Config, tmp_path: Path, data: dict[str, str]
) -> None:
    published(tmp_path / "llama", recipe(tiny, vocab_size=501))
    shutil.copy(data["TOKENIZER"], tmp_path / "llama" / "tokenizer.json")
    with pytest.raises(DataError, match="the tokenizer has 512 entries, but VOCAB_SIZE=501"):
        of_folder(tmp_path / "llama")


def test_a_run_and_a_folder_of_weights(run: Run, folder: tuple[Config, Path]) -> None:
    """A folder asked for by name is opened though the preset's run is there; one that a run named was not trained from
    is refused."""
    _, place = folder
    shutil.copytree(run.folder, run.folder.parent / "tiny")
    c = dataclasses.replace(
        Config(), init_from=str(place), runs_dir=run.config.runs_dir, device="cpu"
    ).derived()
    assert open_trained(c, ALONE, given={"INIT_FROM"}).source == str(place)
    with pytest.raises(
        SettingsError, match=r"INIT_FROM=.*qwen: The run a-run has INIT_FROM=\. Leave INIT_FROM out"
    ):
        run.open({*RUN, "INIT_FROM"}, init_from=str(place))
    facts = json.loads((run.folder / "config.json").read_text())
    facts["settings"]["INIT_FROM"] = str(place)
    (run.folder / "config.json").write_text(json.dumps(facts))
    assert run.open({*RUN, "INIT_FROM"}, init_from=str(place)).step == 3


# ---- What a command was given


def test_given_is_what_no_preset_and_no_default_says(tmp_path: Path) -> None:
    env_file = tmp_path / "own.env"
    env_file.write_text("N_LAYER=4\nPRESET=gpt2-124m\n")
    environ = {
        "ENV_FILE": str(env_file),
        "SEED": "3",
        "RUN_NAME": "x",
        "MAKE_SETTINGS": "RUN_NAME",
        "N_HEAD": "",
    }
    assert resolve(environ).explicit == {"ENV_FILE", "N_LAYER", "PRESET", "SEED", "RUN_NAME"}


def test_rules_about_steps_do_not_keep_a_command_from_looking_at_a_model() -> None:
    environ = {
        "ENV_FILE": "",
        "MICRO_BATCH_SIZE": "7",
        "INIT_FROM": "models/qwen",
        "PATH": os.environ["PATH"],
    }
    with pytest.raises(SettingsError):
        Config.load(environ)
    assert settings_of_command(environ)[0].micro_batch_size == 7
