"""A throwaway checkout for tests of scripts, with a PATH of its own: links to real programs, and
stand-ins, which note their calls in $CALLS."""

import re
import shutil
import subprocess
from pathlib import Path

from settings import ROOT


class Checkout:
    """Some files of this repository in a folder of their own.

    Attributes:
        bin: the only folder of PATH.
        log: a line for each call of a stand-in.
        env: of the commands that run here.
    """

    def __init__(self, folder: Path, *names: str):
        self.root = folder / "checkout"
        self.bin = folder / "bin"
        self.log = folder / "calls"
        self.root.mkdir()
        self.bin.mkdir()
        self.log.touch()
        self.env = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "CALLS": str(self.log),
            "PYTHONDONTWRITEBYTECODE": "1",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_AUTHOR_NAME": "a",
            "GIT_AUTHOR_EMAIL": "a@example.org",
            "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a@example.org",
        }
        no_bytecode = shutil.ignore_patterns("__pycache__")
        for name in names:
            target = self.root / name
            target.parent.mkdir(exist_ok=True)
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, target, ignore=no_bytecode)
            else:
                shutil.copy(ROOT / name, target)

    def link(self, *tools: str) -> None:
        """Put real programs on the PATH, if this machine has them."""
        for tool in tools:
            if program := shutil.which(tool):
                (self.bin / tool).symlink_to(program)

    def add(self, name: str, text: str = "") -> Path:
        """Put a bash script on the PATH."""
        path = self.bin / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
        return path

    def write(self, name: str, content: str | bytes = "") -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def start(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        """Start a command, in a process group of its own. No call is noted yet."""
        self.log.write_text("")
        return subprocess.Popen(
            words,
            cwd=self.root,
            env=self.env | environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, *words: str, code: int = 0, **environ: str) -> str:
        """Return what a command prints, stderr last. Its exit code must be `code`."""
        process = self.start(*words, **environ)
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == code, stdout + stderr
        return stdout + stderr

    def calls(self, pattern: str = "") -> list[str]:
        """Return the calls of stand-ins that a pattern is in."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if re.search(pattern, line)]

    def git(self, *words: str) -> str:
        words = ("git", *words)
        return subprocess.check_output(words, cwd=self.root, env=self.env, text=True).strip()

    def commit(self, message: str) -> str:
        """Commit all files, in a new repository if there is none. Returns the commit."""
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        return self.git("rev-parse", "HEAD")
