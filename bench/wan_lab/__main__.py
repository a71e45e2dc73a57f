"""`make wan-lab`: sites and a WAN on this machine; what the WAN gives, what crosses it, and what training makes of it.

    link       delay and rate that the relay gives, beside those asked for          link.py
    engine     the outer all-reduce alone: share of a capped link                   engine.py
    ratio      DDP beside DiLoCo at the xlarge preset's ratio of compute to traffic ratio.py
    training   four sites that train; one is killed, one cut off                    training.py
    loss       DiLoCo beside DDP at equal tokens, three seeds                       final_loss.py

WAN_LAB says which; all but the last want root and namespaces (network.py). All figures are written as they come to
RUNS_DIR/wan-lab/DATE_TIME/results.json.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.host_facts import machine
from bench.wan_lab import engine, final_loss, link, ratio, training
from bench.wan_lab.network import CannotRun, Link, Network, stopping, what_is_missing
from settings import ROOT, SettingsError, explain_error, load_config
from settings.config import Config
from train.diloco.site_registry import SYNC_STREAMS

WITHOUT_NETWORK = {"loss"}
LOST_PERCENT = 0  # of the packets on each site's way out
Part = tuple[str, Sequence[str], Iterator[dict[str, Any]], Callable[[dict[str, Any]], str]]


def asked_link(c: Config) -> Link:
    return Link(c.wan_gbit, c.wan_rtt_ms / 2, LOST_PERCENT / 100)


def links(wanted: Link) -> Iterator[dict[str, Any]]:
    for sites in (2, 4):
        with Network(sites, wanted) as network:
            yield link.found(network)


def parts(c: Config, folder: Path) -> Iterator[Part]:
    """The parts of WAN_LAB: title, header, what is found, and its line."""
    asked, wanted = c.wan_lab.split(","), asked_link(c)
    if "link" in asked:
        yield "link", link.HEADER, links(wanted), link.row
    if "engine" in asked:
        elements = ratio.scaled(ratio.SMALLER).elements
        yield "engine", engine.HEADER, engine.found(wanted, elements, SYNC_STREAMS), engine.row
    if "ratio" in asked:
        yield (
            "ratio",
            ratio.HEADER,
            ratio.found(wanted),
            ratio.row,
        )
    if "training" in asked:
        yield "training", training.HEADER, training.found(wanted, folder), training.row
    if "loss" in asked:
        yield "loss", final_loss.HEADER, final_loss.found(folder), final_loss.row


def lab(c: Config) -> Path:
    """Measure, print and write. Returns the file of results."""
    say = sys.stdout.write
    folder = ROOT / c.runs_dir / "wan-lab" / time.strftime("%Y%m%d_%H%M%S")
    folder.mkdir(parents=True)
    path, facts = folder / "results.json", machine()
    say("".join(f"{name}: {value}\n" for name, value in facts.items()))
    content: dict[str, Any] = {"schema": 1, "machine": facts}
    for name, header, finds, line in parts(c, folder):
        say("\n" + "\n".join(header) + "\n")
        content[name] = []
        for taken in finds:
            content[name].append(taken)
            path.write_text(json.dumps(content, indent=1) + "\n")
            say(line(taken) + "\n")
            sys.stdout.flush()
        if name == "loss":
            say(final_loss.summary(content[name]) + "\n")
    return path


def main() -> int:
    try:
        c = load_config()
    except SettingsError as error:
        sys.stderr.write(f"{explain_error(error)}\n")
        return 64
    missing = what_is_missing() if set(c.wan_lab.split(",")) - WITHOUT_NETWORK else []
    if missing:
        sys.stderr.write("wan-lab cannot run here:\n" + "".join(f"  {line}\n" for line in missing))
        return 78
    try:
        with stopping():
            path = lab(c)
    except CannotRun as error:
        sys.stderr.write(f"wan-lab: {error}\n")
        return 78
    except RuntimeError as error:  # a process of the lab ended; what was found before is written
        sys.stderr.write(f"wan-lab: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(f"\n{path} has all rounds\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
