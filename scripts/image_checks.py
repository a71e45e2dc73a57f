"""What scripts/image_test.sh holds against expectations: what an image declares, and what a run in it left behind.

python scripts/image_checks.py declared IMAGE.json REVISION VERSION
python scripts/image_checks.py trained RUN LAST_STEP KILLED_AT SAVE_EVERY COMMIT DIRTY CONSOLE
"""

import json
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from record.metrics import keep_final_steps, read_records  # noqa: E402
from record.run_paths import name_checkpoint  # noqa: E402


def declared(image: Path, revision: str, version: str) -> None:
    """Prints how the image is to be run: working directory, environment, a blank line, and entry point with command."""
    config: dict[str, Any] = json.loads(image.read_text())["OCIv1"]["config"]
    labels = {
        name.removeprefix("org.opencontainers.image."): value
        for name, value in config["Labels"].items()
    }
    wanted = {
        "title": "pure-transformer",
        "licenses": "MIT",
        "revision": revision,
        "version": version,
    }
    assert wanted.items() <= labels.items(), f"labels are {labels}"
    assert labels["description"]
    assert datetime.fromisoformat(labels["created"]) < datetime.now(UTC)
    assert "torch=cpu" in labels["pure-transformer.built-with"]
    assert config["User"] == "1000:1000", config["User"]
    assert config["WorkingDir"] == "/app", config["WorkingDir"]
    assert config["Entrypoint"] == ["tini", "--"], config["Entrypoint"]
    assert config["Cmd"] == ["scripts/train.sh"], config["Cmd"]
    environment = dict(line.split("=", 1) for line in config["Env"])
    assert environment["VENV"] == "/opt/venv"
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert "NVIDIA_VISIBLE_DEVICES" not in environment, (
        "a pod that asks for no GPU would see all of its node"
    )
    assert all(
        environment[name].startswith("/tmp")
        for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR")
    )
    leaked = [
        name
        for name in environment
        if re.search(r"PIP_|SSL_|PROXY|KEY|TOKEN|SECRET|PASSWORD", name.upper())
    ]
    assert not leaked, f"the image keeps {leaked} of its build"
    lines = [config["WorkingDir"], *config["Env"], "", *config["Entrypoint"], *config["Cmd"]]
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def trained(
    run: Path, last: int, killed_at: int, save_every: int, commit: str, dirty: str, console: Path
) -> None:
    """Three attempts: one killed, one told to stop, one that ended. What they computed twice they computed alike."""
    records = list(read_records(run / "metrics.jsonl"))
    begins = [r for r in records if r["event"] in ("start", "resume")]
    assert [r["event"] for r in begins] == ["start", "resume", "resume"], begins
    first, second, third = (r["step"] for r in begins)
    assert first == 0 and second == killed_at // save_every * save_every, (first, second)
    steps = [r for r in records if r["event"] == "step"]
    attempts = [[r for r in steps if r["attempt"] == begin["attempt"]] for begin in begins]
    assert attempts[1][0]["step"] == second + 1 and attempts[2][0]["step"] == third + 1
    assert attempts[1][-1]["step"] == third, "it did not save where it was told to stop"
    twice = {r["step"]: r["loss"] for r in attempts[0] if r["step"] > second}
    again = {r["step"]: r["loss"] for r in attempts[1]}
    assert len(twice) >= killed_at - second and all(
        again[step] == loss for step, loss in twice.items()
    ), (twice, again)
    final = keep_final_steps(records)
    assert [r["step"] for r in final] == list(range(1, last + 1)), "steps are missing"
    losses = [float(r["loss"]) for r in final]
    begin, end = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
    assert end < begin - 1.5, f"the loss went from {begin:.3f} to {end:.3f}"
    assert [r["reason"] for r in records if r["event"] == "end"] == ["stopped", "done"]
    assert (run / "checkpoints" / name_checkpoint(last)).is_dir() and (
        run / "plots" / "loss_curves.html"
    ).is_file()
    told = [
        (a["git"], a["git_dirty"])
        for a in json.loads((run / "config.json").read_text())["attempts"]
    ]
    assert told == 3 * [(commit, bool(dirty))], f"the attempts name the commit {told}"
    installing = re.search(
        r"^(setup: |Collecting |Downloading |.*installing .*)", console.read_text(), re.M
    )
    assert not installing, f"something is installed at the start: {installing[0]}"
    sys.stdout.write(
        f"image-test: loss {begin:.3f} -> {end:.3f}; resumed behind steps {second} and {third}, and steps "
        f"{min(twice)} to {max(twice)} came out the same to the bit\n"
    )


def main() -> int:
    match sys.argv[1:]:
        case ["declared", image, revision, version]:
            declared(Path(image), revision, version)
        case ["trained", run, last, killed_at, save_every, commit, dirty, console]:
            trained(
                Path(run), int(last), int(killed_at), int(save_every), commit, dirty, Path(console)
            )
        case _:
            sys.stderr.write("usage: python scripts/image_checks.py declared | trained ...\n")
            return 64
    return 0


if __name__ == "__main__":
    sys.exit(main())
