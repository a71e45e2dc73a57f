"""`make certify`: prove on this machine what the project promises about exactness, and write a certificate.

CERTIFY=short    two minutes on two cores instead of ten
CHECK=FILE       check somebody's certificate: train a part of its run again, and compare

It prints a line for each proof. Exit codes: 0; 1 if a proof fails; 78 if this machine cannot tell.

    DATE_TIME.json   {"schema": 1, "size": "short", "machine": {...}, "settings": {...}, "proofs": [line, ...],
                        "results": {"step 1": "LOSS NORM" in hex, ..., "checkpoint 8": sha256, ...},
                        "sha256": of all of the above}

The sha256 has no key: it finds what was changed by accident. Only training again finds what a forger changed.
"""

import hashlib
import json
import secrets
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.certify.proofs import EQUAL, PROOFS, Certification, NotPromised, compare
from bench.certify.small_run import EVERY, Failed
from bench.certify.strike import kill_processes
from bench.host_facts import machine
from bench.wan_lab.network import stopping
from record.durable import write_whole
from record.exit_codes import BAD_DATA, DONE, OTHER
from record.provenance import version
from settings import ROOT, SettingsError, explain_error
from settings.config import SETTINGS, Config
from settings.declare import FREE, format_value
from settings.finding import FAIL, PASS, WARN
from settings.json_file import read_object
from settings.resolve import build_environment, resolve, show_path
from settings.sources import COMMAND_LINE
from settings.terminal import complain, say
from train.tune import count_gpus, is_intel

SCHEMA = 1
QUIT = 130  # by Ctrl-C
COMPARED = ("cpu", "instructions", "gpu", "torch", "tokenizers", "code")
CODE = ("settings", "record", "hardware", "train", "bench/certify")
WITH_CHECK = ("CHECK", "RUNS_DIR", "ENV_FILE")
# Settings that shape the arithmetic.
CERTIFIED = [
    name
    for name, declared in SETTINGS.items()
    if "certify" in declared.used_by and declared.resume != FREE
]


def describe_machine() -> dict[str, Any]:
    """Return facts of this machine and its code, among them all that results depend on besides the settings."""
    code = hashlib.sha256()
    for room in CODE:
        for path in sorted((ROOT / room).rglob("*.py")):
            code.update(path.read_bytes())
    facts = machine()
    del facts["threads"]  # of this process
    return {
        **facts,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "tokenizers": version("tokenizers"),
        "code": code.hexdigest(),
    }


def choose_settings(config: Config) -> dict[str, str]:
    """Return the settings that shape the arithmetic. Raises SettingsError if they promise no equal bits."""
    environment = build_environment({})
    threads = environment.get("OMP_NUM_THREADS") or "1"
    if threads != "1" and not is_intel():
        rule = "Only on Intel processors are equal bits promised for several threads"
        raise SettingsError([f"OMP_NUM_THREADS={threads}: {rule}. Set OMP_NUM_THREADS=1."])
    processes = config.nproc or (config.device != "cpu" and count_gpus(environment)) or 1
    values = config.replace(nproc=processes).values()
    settings = {name: format_value(values[name]) for name in CERTIFIED}
    return settings | {"OMP_NUM_THREADS": threads}


def hash_content(content: dict[str, Any]) -> str:
    """Return the sha256 of a certificate's content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def certify(config: Config, work: Path) -> int:
    """Prove everything, and write a certificate unless a proof fails. Returns the exit code. Raises Failed."""
    settings = choose_settings(config)
    certification = Certification(work, config.certify, settings)
    results = certification.train_reference()
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "size": config.certify,
        "machine": describe_machine(),
        "settings": settings,
    }
    lines = []
    code = DONE
    for name, prove in PROOFS.items():
        try:
            level, text = PASS, prove(certification, results)
        except NotPromised as reason:
            level, text = WARN, str(reason)
        except Failed as error:
            level, text, code = FAIL, str(error), OTHER.code
        lines.append(f"{level}  {name:9}  {text}")
        say(lines[-1])
    if code != DONE:
        return code
    saved = [f"{key}: {value}" for key, value in results.items() if key.startswith("checkpoint")]
    described = json.dumps(content, indent=1)
    page = ["# Certificate of exactness", "```", *lines, described, *saved, "```", ""]
    content |= {"proofs": lines, "results": results}
    content["sha256"] = hash_content(content)
    path = work.with_suffix(".json")
    write_whole(path, json.dumps(content, indent=1).encode())
    write_whole(work.with_suffix(".md"), "\n".join(page).encode())
    say(f"Certificate: {show_path(path)}, and .md to read")
    return DONE


def check(config: Config, work: Path) -> int:
    """Train a part of the run of a certificate again. Returns the exit code. Raises Failed."""
    try:
        content = read_object(ROOT / config.check)
    except (FileNotFoundError, ValueError) as error:
        raise Failed(f"CHECK={config.check} {str(error) or 'does not exist'}") from None
    if content.pop("sha256", "") != hash_content(content):
        raise Failed(f"CHECK={config.check} was edited or damaged: its sha256 does not fit")
    if content["schema"] != SCHEMA:
        raise Failed(
            f"CHECK={config.check} has format {content['schema']}; this version reads {SCHEMA}"
        )
    here, there = describe_machine(), content["machine"]
    for name in COMPARED:
        if here[name] != there[name]:
            say(f"{WARN}  not comparable: {name} is {here[name]}, and was {there[name]}")
            return BAD_DATA
    settings = {name: content["settings"][name] for name in [*CERTIFIED, "OMP_NUM_THREADS"]}
    certification = Certification(work, content["size"], settings)
    last = secrets.choice(range(EVERY, certification.steps + 1, EVERY))
    results = certification.train_reference(MAX_STEPS=str(last))
    compare({key: content["results"].get(key) for key in results}, results)
    say(f"{PASS}  steps 1 to {last} of {certification.steps}, trained again: {EQUAL}")
    return DONE


def run(config: Config, work: Path) -> int:
    """Certify or check. Ends all processes, and deletes their runs if nothing failed. Returns the exit code."""
    code = OTHER.code
    try:
        with stopping():
            code = check(config, work) if config.check else certify(config, work)
    except Failed as error:
        say(f"{FAIL}  {error}")
    except (SettingsError, SystemExit):
        code = QUIT
        raise
    except KeyboardInterrupt:
        code = QUIT
        complain("Stopped: nothing is certified. The same command starts from the beginning.")
    finally:
        kill_processes(work)
        if code != OTHER.code:
            shutil.rmtree(work, ignore_errors=True)
    return code


def main() -> int:
    """Return the exit code."""
    if sys.platform != "linux":
        complain("make certify needs Linux: it finds the processes that it kills in /proc.")
        return BAD_DATA
    try:
        resolved = resolve().check()
        config = resolved.config
        for name, origin in resolved.origins.items():
            if config.check and origin == COMMAND_LINE and name not in WITH_CHECK:
                raise SettingsError([f"{name}: Leave it out. CHECK takes it from the certificate."])
        work = ROOT / config.runs_dir / "certify" / time.strftime("%Y%m%d_%H%M%S")
        return run(config, work.absolute())
    except SettingsError as error:
        complain(explain_error(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
