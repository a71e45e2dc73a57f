"""record/regular_file.py: what a copied folder may hold in the place of a file is refused, and nothing waits."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from record import regular_file
from record.regular_file import is_file_name, only_regular, open_inside, open_regular
from settings import ROOT

ELSEWHERE = Path(__file__)
OTHERS = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a pipe": lambda path: (os.mkfifo(f"{path}.p"), path.symlink_to(f"{path}.p")),
    "a link to nothing": lambda path: path.symlink_to("absent"),
    "nothing": lambda path: None,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_file_is_refused_at_once(tmp_path, name):
    OTHERS[name](tmp_path / "file")
    for read in (lambda: open_regular(tmp_path / "file"), lambda: open_inside(tmp_path, "file")):
        with pytest.raises(OSError, match=r"file|regular|directory"):
            read()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["a pipe", "a folder", "a device", "a link to a pipe"])
def test_nothing_is_appended_to_what_is_no_file(tmp_path, name):
    OTHERS[name](tmp_path / "file")
    with pytest.raises(OSError, match=r"regular|directory"):
        only_regular(tmp_path / "file", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def test_a_file_is_made_and_appended_to(tmp_path):
    for content in (b"a", b"ab"):
        with open(tmp_path / "file", "ab", opener=only_regular) as file:
            file.write(b"ab"[len(content) - 1 : len(content)])
        assert (tmp_path / "file").read_bytes() == content
    assert not (tmp_path / "file").stat().st_mode & stat.S_IXUSR


def test_a_file_is_read_and_a_link_where_somebody_has_named_it(tmp_path):
    (tmp_path / "file").write_bytes(b"abc" * 10**6)
    (tmp_path / "link").symlink_to("file")
    for opened in (open_inside(tmp_path, "file"), open_regular(tmp_path / "link")):
        with opened as file:
            assert file.read() == b"abc" * 10**6
    with pytest.raises(OSError, match="not a regular file"):
        open_inside(tmp_path, "link")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\0b"])
def test_a_name_leads_nowhere_else(tmp_path, name):
    assert not is_file_name(name)
    with pytest.raises(OSError, match="not the name of a file"):
        open_inside(tmp_path, name)


SILENT = """
import time
from pathlib import Path
from record import regular_file
regular_file.LOOK_S = 0.01
def report(code, reason):
    print("reported", code, reason, flush=True)

with regular_file.limit_silence(Path("/mnt/runs"), 0.2, report):
    time.sleep(250)
"""


def test_a_disk_that_does_not_answer_is_named(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SILENT], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 71 and "/mnt/runs: reading it has made no progress" in done.stderr
    assert done.stdout == f"reported 71 {done.stderr}"


def test_what_is_read_is_progress(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(10**6))
    with open_inside(tmp_path, "file") as file:
        monkeypatch.setattr(regular_file, "last_read_s", 0.0)
        file.read(10**5)
        assert regular_file.last_read_s > 0
    with regular_file.limit_silence(tmp_path, 1000):
        pass
