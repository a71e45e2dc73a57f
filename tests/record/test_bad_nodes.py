"""record/bad_nodes.py: which nodes pods refuse, and for how long."""

import json
import os
import subprocess
import time

from record import bad_nodes
from record.bad_nodes import BadNode


def list_by_shell(folder):
    command = ["sh", "-c", bad_nodes.LIST_COMMAND, "sh", folder]
    done = subprocess.run(command, check=True, text=True, capture_output=True)
    return bad_nodes.parse(done.stdout)


def test_a_node_is_listed_for_a_day(tmp_path, monkeypatch):
    folder = tmp_path / "runs" / bad_nodes.FOLDER
    assert bad_nodes.find(folder, "node-a") is None and list_by_shell(folder) == []
    began = time.time()
    bad_nodes.add(folder, "node-a", "GPU 0 is lost")
    bad_nodes.write(folder, BadNode("node-b.example.org", "no driver", began - 23 * 3600, 4))
    bad_nodes.write(folder, BadNode("node-c", "no driver", began - 25 * 3600))
    found = bad_nodes.find(folder, "node-a")
    assert (found.name, found.reason, found.refusals) == ("node-a", "GPU 0 is lost", 0)
    assert began <= found.found_at <= time.time()
    assert bad_nodes.find(folder, "node-c") is None
    listed = list_by_shell(folder)
    assert [node.name for node in listed] == ["node-a", "node-b.example.org"]
    assert listed[1].refusals == 4
    monkeypatch.setattr(time, "time", lambda: began + 25 * 3600)
    assert list_by_shell(folder) == []


def test_what_is_damaged_or_half_written_does_not_count(tmp_path):
    bad_nodes.add(tmp_path, "node-a", "GPU 0 is lost")
    (tmp_path / "node-b.json").write_text('{"name": "node-b", "rea\n')
    (tmp_path / "node-c.json").write_text('{"name": "node-c", "reason": "x", "found_at": "y"}\n')
    (tmp_path / "node-d.json.tmp-1").write_text('{"name": "node-d", "reason": "", "found_at": 9e9}')
    entry = {"name": "node-e", "reason": "x", "found_at": time.time()}
    for number, change in enumerate(({"refusals": "z"}, {"reason": 1}, {"name": "\033[31m"})):
        (tmp_path / f"node-e{number}.json").write_text(json.dumps(entry | change) + "\n")
    (tmp_path / "node-f.json").write_bytes(b"\xff\xfe\n")
    assert bad_nodes.find(tmp_path, "node-f") is None
    (tmp_path / "node-f.json").unlink()
    assert [node.name for node in list_by_shell(tmp_path)] == ["node-a"]
    assert bad_nodes.find(tmp_path, "node-b") is None


def test_clearing_takes_all_away(tmp_path):
    bad_nodes.add(tmp_path / "list", "node-a", "GPU 0 is lost")
    subprocess.run(["sh", "-c", bad_nodes.CLEAR_COMMAND, "sh", tmp_path / "list"], check=True)
    assert os.listdir(tmp_path) == [] and list_by_shell(tmp_path / "list") == []


def test_a_volume_that_cannot_be_written_is_no_other_fault(tmp_path):
    (tmp_path / "file").touch()
    bad_nodes.add(tmp_path / "file", "node-a", "GPU 0 is lost")
