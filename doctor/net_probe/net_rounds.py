"""Who sends to whom, and when: each ordered pair of nodes once, in rounds of pairs that do not disturb each other."""

import itertools
from collections.abc import Sequence


def rounds(sites: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Each ordered pair of nodes in one of these. In a round a node is in one pair at most, and so is a site's link to
    other sites, where sites are known; two nodes of one site do not need it."""
    left = list(itertools.permutations(range(len(sites)), 2))
    found = []
    while left:
        chosen: list[tuple[int, int]] = []
        taken: set[object] = set()
        for pair in left:
            needs = needs_of(pair, sites)
            if not needs & taken:
                chosen.append(pair)
                taken |= needs
        found.append(chosen)
        left = [pair for pair in left if pair not in chosen]
    return found


def needs_of(pair: tuple[int, int], sites: Sequence[str]) -> set[object]:
    """The nodes, and between two sites that are known the links of both."""
    start, end = (sites[node] for node in pair)
    return {*pair, *({start, end} if start and end and start != end else ())}


def ring(sites: Sequence[str]) -> list[tuple[int, int]]:
    """As a sync between sites goes: each node to the one in its place at the next site; where sites are not known,
    or there is one, each to the next."""
    names = list(dict.fromkeys(sites))
    if not all(sites) or len(names) == 1:
        return [(node, (node + 1) % len(sites)) for node in range(len(sites))]
    members = {name: [node for node, site in enumerate(sites) if site == name] for name in names}
    found = []
    for at, name in enumerate(names):
        others = members[names[(at + 1) % len(names)]]
        found += [(node, others[place % len(others)]) for place, node in enumerate(members[name])]
    return sorted(found)
