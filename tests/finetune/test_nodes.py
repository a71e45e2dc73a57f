"""Two nodes of a fine-tuning by hand, each with its scripts and torchrun, over loopback: they train as one process
does, and what one of them has otherwise, or not at all, is refused on both."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.finetune.making import row, write_rows
from tests.finetune.models import models
from tests.finetune.test_training import chats, env_of, finetune, losses, records
from tests.running import ROOT, wait_for

__all__ = ["chats", "models"]  # fixtures

pytestmark = pytest.mark.slow


class Nodes:
    """make finetune-node on each of two, which share no disk: whatever they have started ends with them."""

    def __init__(self, folder: Path, *envs: dict[str, str]):
        self.folder, self.logs = folder, list[Path]()
        self.started: list[subprocess.Popen[bytes]] = []
        for env in envs:
            self.start(env)

    def start(self, env: dict[str, str]) -> None:
        """The next one."""
        rank = len(self.started)
        self.logs.append(self.folder / f"console_{rank}")
        with open(self.logs[rank], "w") as out:
            self.started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "scripts.train", "finetune", "node"],
                    env=env | {"NODE_RANK": str(rank)},
                    cwd=ROOT,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            )

    def ends(self, *codes: int) -> list[str]:
        """What each said, once it has ended with its code."""
        deadline, got = time.monotonic() + 270, list[int | None]()
        for node in self.started:
            try:
                got.append(node.wait(max(1.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                got.append(None)
        said = [log.read_text() for log in self.logs]
        assert tuple(got) == codes, "\n".join(said)
        return said


@pytest.fixture
def all_nodes() -> Iterator[list[Nodes]]:
    started: list[Nodes] = []
    yield started
    for nodes in started:
        for node in nodes.started:
            node.terminate()  # the scripts hand it on
            node.wait(120)


@pytest.fixture
def env(tmp_path: Path, models: dict[str, Path], chats: Path, free_port: int) -> dict[str, str]:
    return env_of(
        tmp_path,
        models["llama"],
        chats,
        NODES="2",
        NPROC="1",
        MASTER_ADDR=f"127.0.0.1:{free_port}",
        START_TIMEOUT_S="300",
        ALLOW_FAIL="gpus,memory,disk,host-memory",
        PRESET="finetune",
        LORA_RANK="4",
    )


def of_the_second(env: dict[str, str], folder: Path) -> dict[str, str]:
    """A machine with disks of its own."""
    return env | {"RUNS_DIR": str(folder / "second"), "DATA_DIR": str(folder / "second" / "data")}


def test_two_nodes_train_as_one_process_does(
    tmp_path: Path,
    env: dict[str, str],
    models: dict[str, Path],
    chats: Path,
    all_nodes: list[Nodes],
) -> None:
    (tmp_path / "one").mkdir()
    finetune(env_of(tmp_path / "one", models["llama"], chats, PRESET="finetune", LORA_RANK="4"))
    all_nodes.append(Nodes(tmp_path, env, of_the_second(env, tmp_path)))
    first, second = all_nodes[-1].ends(0, 0)
    for said in (first, second):
        assert "rendezvous: all nodes have joined" in said
    assert "the nodes do not share" in first and "step=12/12" in first
    assert losses(tmp_path) == pytest.approx(losses(tmp_path / "one"), rel=2e-5)
    scores = [
        [entry["val_loss"] for entry in records(place) if entry["event"] == "eval"]
        for place in (tmp_path, tmp_path / "one")
    ]
    assert scores[0] == pytest.approx(scores[1], rel=2e-5)
    assert len(scores[0]) == 3  # before the first step, on the way, and at the end
    assert not (tmp_path / "second" / "run" / "checkpoints").exists() or not list(
        (tmp_path / "second" / "run" / "checkpoints").glob("step_*")
    )


@pytest.fixture
def homes(
    tmp_path: Path, env: dict[str, str], models: dict[str, Path], chats: Path
) -> list[dict[str, str]]:
    """Two machines with a home each, in which MODEL and DATA have the same names and are the same."""
    envs = []
    for node, given in (("one", env), ("other", of_the_second(env, tmp_path))):
        home = tmp_path / node
        shutil.copytree(models["llama"], home / "model")
        shutil.copy(chats, home / "chats.jsonl")
        envs.append(given | {"HOME": str(home), "MODEL": "~/model", "DATA": "~/chats.jsonl"})
    return envs


@pytest.mark.parametrize("what", ["weights", "tokenizer", "rows"])
def test_a_node_that_read_something_else_is_refused_on_both(
    tmp_path: Path, homes: list[dict[str, str]], all_nodes: list[Nodes], what: str
) -> None:
    other = tmp_path / "other"
    if what == "rows":
        write_rows(other / "chats.jsonl", [row(f"Is it {i}?", f"It is {i}.") for i in range(200)])
    elif what == "tokenizer":
        template = other / "model" / "chat_template.jinja"
        template.write_text(template.read_text().replace("<|im_end|>\n", "<|im_end|>"))
    else:
        path = sorted((other / "model").glob("model-*.safetensors"))[0]
        held = bytearray(path.read_bytes())
        held[len(held) // 2] ^= 1
        path.write_bytes(held)
    all_nodes.append(Nodes(tmp_path, *homes))
    named = "DATA=~/chats.jsonl" if what == "rows" else "MODEL=~/model"
    for said in all_nodes[-1].ends(78, 78):
        assert re.search(
            rf"{named}: rank 1 on \S+ \(node 1\) has other {what}.* than rank 0 on \S+ \(hashes",
            said,
        )
        assert "parameters, of which" not in said  # no weight was read


@pytest.mark.parametrize("what", ["MODEL", "DATA"])
def test_what_a_node_does_not_have_is_told_to_both(
    tmp_path: Path, homes: list[dict[str, str]], all_nodes: list[Nodes], what: str
) -> None:
    if what == "MODEL":
        shutil.rmtree(tmp_path / "other" / "model")
    else:
        (tmp_path / "other" / "chats.jsonl").unlink()
    all_nodes.append(Nodes(tmp_path, homes[0]))
    wait_for(
        all_nodes[-1].logs[0], "rendezvous: 1 of 2"
    )  # a node that fails tells whoever listens for some seconds
    all_nodes[-1].start(homes[1])
    code = 64 if what == "MODEL" else 78
    first, second = all_nodes[-1].ends(code, code)
    why = (
        "MODEL=~/model: There is no such run"
        if what == "MODEL"
        else "DATA=~/chats.jsonl: there is no such file"
    )
    assert why in second and "rendezvous: all nodes" not in second
    assert re.search(rf"node 1 \(\S+\) has ended with exit code {code}: .*{re.escape(why)}", first)


def test_a_node_alone_waits_for_the_other_and_says_so(
    tmp_path: Path, env: dict[str, str], all_nodes: list[Nodes]
) -> None:
    all_nodes.append(Nodes(tmp_path, env | {"START_TIMEOUT_S": "10"}))
    (said,) = all_nodes[-1].ends(69)
    assert "1 of 2 nodes have joined" in said and "missing: 1" in said
