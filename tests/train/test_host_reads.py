"""One read of the device by the host in a step of the whole loop, with the log, counted at the methods of a tensor that
hand its numbers to Python. What only a GPU can show, that nothing else waits for it, is in tests/gpu/test_gpu.py."""

import json
import sys

from tests.running import environment, train

# Runs the trainer, and writes for each step record which reads there were since the one before, by who asked.
COUNTER = """
import collections, json, sys, traceback
from pathlib import Path
import torch
from train import main; from record import recorder

reads, found, write = collections.Counter(), [], recorder.Recorder.step

def counted(name):
    method = getattr(torch.Tensor, name)
    def read(self, *args, **kwargs):
        asking = [frame for frame in traceback.extract_stack(limit=15) if Path(frame.filename).is_relative_to(Path.cwd() / "train")]
        reads[f"{name} in {Path(asking[-1].filename).stem}.{asking[-1].name}" if asking else name] += 1
        return method(self, *args, **kwargs)
    return read

def step(self, number, *args, **kwargs):
    write(self, number, *args, **kwargs)
    found.append(dict(reads))
    reads.clear()

for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"):
    setattr(torch.Tensor, name, counted(name))
recorder.Recorder.step = step
code = main.main()
Path(sys.argv[1]).write_text(json.dumps(found))
sys.exit(code)
"""

READ = {"tolist in step.read_numbers": 1}
EVALUATED = {"tolist in scoring.add_up": 1}


def test_a_step_reads_the_device_once_and_an_evaluation_once_more(tmp_path, data):
    env = environment(tmp_path, data, EVAL_EVERY=3, MAX_STEPS=8, LOG_EVERY=1, SAVE_EVERY="0")
    train(env, command=[sys.executable, "-c", COUNTER, str(tmp_path / "reads.json")])
    found = json.loads((tmp_path / "reads.json").read_text())
    assert len(found) == 8
    assert found[1:] == [
        READ | EVALUATED if step in (4, 7) else READ for step in range(2, 9)
    ]  # behind steps 3 and 6
    assert found[0]["tolist in step.read_numbers"] == 1
