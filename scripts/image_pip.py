"""What pip is told on this machine, for the build of an image: a pip.conf, and the folders that are to be lent to it.

    python scripts/image_pip.py FOLDER      FOLDER is what the build will see as /mnt

Writes FOLDER/pip.conf, in which local folders and files have their names below /mnt, and FOLDER/mounts, a line "HERE
THERE" for each: what is to be mounted where. Both may hold a password of an index, and are readable by this user only.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

# Of pip's many settings those that say where packages come from and how to get there.
KEPT = (
    "index-url",
    "extra-index-url",
    "find-links",
    "no-index",
    "trusted-host",
    "cert",
    "client-cert",
    "proxy",
    "timeout",
    "default-timeout",
    "retries",
)
SEEN_AT = "/mnt"


def settings() -> dict[str, str]:
    """pip's, whichever file or variable they are in; the environment wins, as it does for pip."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    )
    found: dict[str, str] = {}
    lines = [line.split("=", 1) for line in done.stdout.splitlines() if "=" in line]
    for name, value in sorted(lines, key=lambda line: line[0].startswith(":env:")):
        key = name.rpartition(".")[2]
        if key in KEPT:
            found[key] = " ".join(str(ast.literal_eval(value)).split())
    return found


def lent(key: str, word: str, folder: Path, mounts: dict[Path, Path]) -> str:
    """A word of a value as the build is to see it: a path of this machine becomes one below /mnt."""
    scheme, path = (
        ("file://", word.removeprefix("file://")) if word.startswith("file://") else ("", word)
    )
    here = Path(path)
    if not here.is_absolute() or not here.exists():
        return word
    # the pages of an index point to files beside it
    top = here.parent if key.endswith("index-url") and here.is_dir() else here
    there = mounts.setdefault(top, folder / str(len(mounts)))
    return (
        scheme + str(Path(SEEN_AT) / there.name / here.relative_to(top))
        if top != here
        else scheme + str(Path(SEEN_AT) / there.name)
    )


def main() -> int:
    folder = Path(sys.argv[1])
    mounts: dict[Path, Path] = {}
    lines = ["[global]"]
    for key, value in settings().items():
        lines.append(
            f"{key} = " + " ".join(lent(key, word, folder, mounts) for word in value.split())
        )
    os.umask(0o077)
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")
    (folder / "mounts").write_text("".join(f"{here} {there}\n" for here, there in mounts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
