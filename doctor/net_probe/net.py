"""What make net-probe does on each node, and its table.

    make net-probe NODES=4 NODE_RANK=i MASTER_ADDR=host      on each node; node 0 listens at MASTER_ADDR,
                                                             says who measures what, and prints the table
    make net-probe WHERE=cluster                             between the running pods of the job (pods.py)
    python -m doctor.net_probe.net pod RANK NODES ADDRESS PORT SECONDS JOIN_SECONDS SITE
                                                             what that starts in each pod; node 0 prints JSON

The table has the round trips and what goes through from each node to each other, with one connection and with
16, a pair at a time; and what each node sends while all send, as a sync between sites does. Its last
line is what make plan is to be given; RUNS_DIR/net_probe.json keeps it, and make plan takes it from there. Exit codes:
0; 64 a bad setting; 69 a node is missing or was lost, or cannot be reached from another; 78 no port to listen on, or
a cluster that refuses.
"""

import logging
import sys
from collections.abc import Sequence

from doctor.net_probe import net_nodes
from plan.network import links
from plan.network.links import Links, Pair
from plan.report import table, wrapped
from settings import SettingsError, explain_error
from settings.addresses import join_address
from settings.config import Config
from settings.resolve import resolve
from settings.terminal import complain
from train.distributed.registry import Verdict

BAD_SETTING, TOLD_TO_STOP = 64, 130


def main(argv: Sequence[str]) -> int:
    """What runs in a pod. Images do without k8s/, so that what decides between here and a cluster is in __main__.py."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        _, *said = argv
        return in_pod(*said)
    except SettingsError as error:
        complain(explain_error(error))
        return BAD_SETTING
    except KeyboardInterrupt:
        return TOLD_TO_STOP


def here(c: Config) -> int:
    """One node of several machines."""
    check(c)
    if c.node_rank:
        return ended(net_nodes.take_part(c))
    verdict, found = net_nodes.conduct(c)
    if found:
        tell(found, c.runs_dir)
    return ended(verdict)


def check(c: Config) -> None:
    """Raises SettingsError."""
    problems = []
    if c.nodes == 1:
        problems.append(
            "NODES=1: there is nothing between nodes to measure; set NODES to their number, for example "
            "NODES=4, NODE_RANK to which this is, from 0, and MASTER_ADDR to the address of the first"
        )
    elif c.node_rank >= c.nodes:
        problems.append(
            f"NODE_RANK={c.node_rank} with NODES={c.nodes}: nodes are counted from 0; the last is "
            f"NODE_RANK={c.nodes - 1}"
        )
    if c.nodes > 1 and not c.master_addr:
        problems.append(
            f"NODES={c.nodes} needs MASTER_ADDR, the first node's name or address; for example "
            "MASTER_ADDR=10.0.0.5"
        )
    if c.nodes % c.sites:
        problems.append(
            f"SITES={c.sites}: NODES={c.nodes} cannot be spread evenly over them; for example "
            f"SITES={c.nodes}"
        )
    if problems:
        raise SettingsError(problems)


def in_pod(
    rank: str,
    nodes: str,
    address: str,
    port: str,
    seconds: str,
    join_s: str,
    site: str = "",
) -> int:
    """Beside a job that is at work: all is said, and the settings are asked for the secret alone."""
    c = resolve().config.replace(
        node_rank=int(rank),
        nodes=int(nodes),
        master_addr=join_address(address, int(port)),
        start_timeout_s=int(join_s),
    )
    if c.node_rank:
        return ended(net_nodes.take_part(c, site))
    verdict, found = net_nodes.conduct(c, site, float(seconds))
    if found:
        sys.stdout.write(links.to_json(found))
    return ended(verdict)


def ended(verdict: Verdict) -> int:
    if verdict.why:
        complain(f"net-probe: {verdict.why}")
    return verdict.code


# ---------------------------------------------------------------------------------------------------
# What was found, in words
# ---------------------------------------------------------------------------------------------------


def tell(found: Links, runs_dir: str) -> None:
    """The table, and the file for make plan."""
    try:
        kept = f"in {links.write(runs_dir, found)}, where make plan finds them"
    except OSError as error:
        kept = f"kept nowhere ({links.path_of(runs_dir)}: {error.strerror}); give them to make plan"
    sys.stdout.write("\n".join([*told(found), *summary(found, kept)]) + "\n")
    sys.stdout.flush()


def told(found: Links) -> list[str]:
    """A line for each ordered pair, and one for each node while all send."""
    many = f"{found.streams} connections"
    rows = [["from", "to", "round trip ms", "of 95%", "Gbit/s, 1 connection", many]]
    rows += [
        [name(found, pair.start), name(found, pair.end), *figures(pair)]
        for pair in sorted(found.pairs, key=lambda pair: (pair.start, pair.end))
    ]
    at_once = [
        ["all at once, from", "to", f"Gbit/s, {many}"],
        *(
            [name(found, flow.start), name(found, flow.end), number(flow.gbit)]
            for flow in found.at_once
        ),
    ]
    return [*table(rows, left=(0, 1)), *(table(at_once, left=(0, 1)) if found.at_once else [])]


def figures(pair: Pair) -> list[str]:
    return [
        number(value) for value in (pair.rtt_ms, pair.rtt_p95_ms, pair.one_gbit, pair.many_gbit)
    ]


def number(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def name(found: Links, node: int) -> str:
    site = f" at {found.sites[node]}" if found.known else ""
    return f"node {node} ({found.hosts[node]}){site}"


def summary(found: Links, kept: str) -> list[str]:
    """What to give to make plan, last."""
    typed = " ".join(f"{name}={value}" for name, value in found.settings.items())
    if not typed:
        return ["nothing could be measured"]
    nodes, sites = len(found.hosts), len(set(found.sites))
    shape = f"NODES={nodes} SITES={sites} " if found.known and nodes % sites == 0 else ""
    if not found.known:
        shape = f"NODES={nodes} SITES={nodes} "
    what = "the slowest of pairs and of all at once; " + (
        "each node counts as a site of its own, SITES says otherwise; " if not found.known else ""
    )
    return [*wrapped(f"{what}{kept}:"), f"{shape}{typed}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
