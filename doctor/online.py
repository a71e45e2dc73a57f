"""What the run needs of the world outside: Weights & Biases, the Hugging Face hub, and the right time.

Where W&B and the hub are is what their own clients would take (WANDB_BASE_URL, HF_ENDPOINT). Each is asked only where
the run will; secrets go into a request's header and nowhere else.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from doctor import web
from plan.data_wanted import sealed
from record.tracker_settings import find_key, find_mode, find_server, has_identity
from settings.config import Config
from settings.finding import FAIL, PASS, WARN, Finding
from train.data.data_paths import source_of, tokenizer_path
from train.data.sources.hub import PASSES
from train.data.sources.source import CorpusError

CLOCK_S = 60.0  # tokens and certificates are refused some minutes off; and files and logs of nodes do not compare
VIEWER = (
    b'{"query": "query Viewer { viewer { entity username teams { edges { node { name } } } } }"'
    b', "operationName": "Viewer"}'
)


# ---------------------------------------------------------------------------------------------------
# Weights & Biases
# ---------------------------------------------------------------------------------------------------


def ask_wandb(c: Config) -> web.Answer | None:
    """What it says to the key; None where the run will not ask it, or no key proves who asks."""
    if find_mode(c) != "online" or not (secret := find_key(c)):
        return None
    return web.ask(find_server().rstrip("/") + "/graphql", web.basic("api", secret), VIEWER)


def wandb(c: Config, answer: web.Answer | None) -> Finding:
    """The run itself goes on without W&B, whatever happens there: only what was asked for by name fails."""
    if find_mode(c) == "disabled":
        why = "WANDB_MODE=disabled" if c.wandb_mode == "disabled" else "there is no WANDB_API_KEY"
        return Finding("wandb", PASS, f"not wanted: {why}")
    if find_mode(c) == "offline":
        return Finding("wandb", PASS, "WANDB_MODE=offline: into files, which can be sent later")
    if answer is None:
        what = (
            "a token file (WANDB_IDENTITY_TOKEN_FILE)"
            if has_identity()
            else "no key that could be tried"
        )
        return Finding("wandb", PASS, f"not tried: there is {what}")
    level = FAIL if c.wandb_mode == "online" else WARN
    if answer.status in (401, 403) or (answer.ok and viewer_of(answer) == {}):
        return Finding(
            "wandb",
            level,
            f"{answer.host} refuses the key ({answer.status})",
            "set WANDB_API_KEY to one "
            "that is listed in your settings there, run wandb login anew, or set WANDB_MODE=disabled",
        )
    if not answer.ok:
        said = answer.problem or f"it answers {answer.status}"
        return Finding(
            "wandb",
            WARN,
            f"{answer.host} is out of reach: {said}; the run goes on into files",
            "check the "
            "network and HTTPS_PROXY; WANDB_MODE=offline leaves it for later (make mirror)",
        )
    viewer = viewer_of(answer)
    if viewer is None:
        return Finding(
            "wandb", WARN, f"{answer.host} answers, but not as W&B does", "check WANDB_BASE_URL"
        )
    teams = teams_of(viewer)
    if c.wandb_entity and c.wandb_entity not in teams:
        return Finding(
            "wandb",
            level,
            f"WANDB_ENTITY={c.wandb_entity}: the key at {answer.host} is for "
            f"{', '.join(teams) or 'no team'}",
            "choose one of these, or have yourself invited",
        )
    return Finding(
        "wandb",
        PASS,
        f"{answer.host} takes the key, for {c.wandb_entity or (teams or ['its user'])[0]}",
    )


def viewer_of(answer: web.Answer) -> dict | None:
    """Whose key it is: {} where it is nobody's, None where the answer is none of W&B's."""
    try:
        return json.loads(answer.body)["data"]["viewer"] or {}
    except (ValueError, KeyError, TypeError):
        return None


def teams_of(viewer: dict) -> list[str]:
    """Where it may write: its default first, itself, and its teams."""
    try:
        teams = [edge["node"]["name"] for edge in viewer["teams"]["edges"]]
    except (KeyError, TypeError):
        teams = []
    named = [viewer.get("entity"), viewer.get("username"), *teams]
    return list(dict.fromkeys(str(name) for name in named if name))


# ---------------------------------------------------------------------------------------------------
# The hub
# ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A repository on the hub of which the run needs something that is not here. kind: "datasets" or "models"."""

    kind: str
    repository: str
    setting: str


@dataclasses.dataclass(frozen=True)
class Hub:
    """token: whether there is one, and who: what the hub says to it. answers: to whether each may be read."""

    wanted: tuple[Wanted, ...]
    token: bool = False
    offline: bool = False
    who: web.Answer | None = None
    answers: tuple[web.Answer, ...] = ()
    problem: str = ""


def wanted_of(c: Config) -> tuple[Wanted, ...]:
    """What will be fetched. Raises CorpusError for a source that is none."""
    sources = [source_of(c, name) for name in c.mixture]
    found = []
    if (
        c.tokenizer != "train"
        and not c.tokenizer.endswith(".json")
        and not os.path.isfile(tokenizer_path(c))
    ):
        found.append(Wanted("models", c.tokenizer, "TOKENIZER"))
    for s in sources:
        shards = sealed(c, s) if s.kind == "hub" else None
        if s.kind == "hub" and not (shards and shards.whole):
            found.append(Wanted("datasets", s.repository, "DATA_MIX"))
    return tuple(found)


def ask_hub(c: Config) -> Hub:
    """Asks what the run will need, all at once."""
    try:
        wanted = wanted_of(c)
    except CorpusError as error:
        return Hub((), problem=str(error))
    if not wanted:
        return Hub(())
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        return Hub(wanted, offline=True)
    token = c.hf_token or get_token() or ""
    headers, end = web.bearer(token), constants.ENDPOINT
    urls = [f"{end}/api/{one.kind}/{one.repository}/auth-check" for one in wanted]
    urls += [f"{end}/api/whoami-v2"] if token else []
    answers = together([functools.partial(web.ask, url, headers) for url in urls])
    return Hub(
        wanted, bool(token), False, answers[-1] if token else None, tuple(answers[: len(wanted)])
    )


def together(questions: Sequence[Callable[[], web.Answer]]) -> list[web.Answer]:
    """The answers, asked side by side; each question ends by itself."""
    with ThreadPoolExecutor(max(1, len(questions))) as pool:
        return [running.result() for running in [pool.submit(question) for question in questions]]


def hub(h: Hub) -> list[Finding]:
    if h.problem:
        return [Finding("hub", FAIL, h.problem, "", 64)]
    if not h.wanted:
        return [
            Finding("hub", PASS, "not needed: nothing that the run wants is fetched from there")
        ]
    names = ", ".join(one.repository for one in h.wanted)
    if h.offline:
        return [
            Finding(
                "hub",
                FAIL,
                f"{names}: not here yet, and HF_HUB_OFFLINE is set",
                "unset it, or prepare data where there is a network (make data) and bring DATA_DIR",
            )
        ]
    if h.who and h.who.status == 401:
        return [
            Finding(
                "hub",
                FAIL,
                f"{h.who.host} refuses HF_TOKEN (401), and with it every question, for open data "
                "too",
                "set HF_TOKEN to one that is listed in your settings there, or unset it and delete "
                "~/.cache/huggingface/token",
            )
        ]
    alike: dict[
        tuple[int | None, str], list[tuple[Wanted, web.Answer]]
    ] = {}  # read, or not answered for one reason
    for one, answer in zip(h.wanted, h.answers, strict=True):
        differs = "" if answer.ok or answer.status is None else one.repository
        alike.setdefault((answer.status, answer.problem + differs), []).append((one, answer))
    return [judged(h, [one for one, _ in group], group[0][1]) for group in alike.values()]


def judged(h: Hub, alike: Sequence[Wanted], answer: web.Answer) -> Finding:
    """Whether repositories can be read of which the hub said the same; of a refusal there is one."""
    one = alike[0]
    page = f"https://{answer.host}/{'datasets/' if one.kind == 'datasets' else ''}{one.repository}"
    settings = {
        w.setting: ", ".join(v.repository for v in alike if v.setting == w.setting) for w in alike
    }
    said = " and ".join(f"{setting}: {names}" for setting, names in settings.items())
    if answer.ok:
        return Finding("hub", PASS, f"{answer.host} lets read {said}")
    gated = answer.headers.get("x-error-code") == "GatedRepo"
    if gated or answer.status == 403:
        fix = (
            f"accept its license at {page} with the account of HF_TOKEN, and let the token read gated repositories"
            if h.token
            else f"accept its license at {page}, and set HF_TOKEN to a token of that account"
        )
        return Finding("hub", FAIL, f"{said} is gated, and may not be read ({answer.status})", fix)
    if answer.status in (401, 404):
        return Finding(
            "hub",
            FAIL,
            f"{said} does not exist at {answer.host}, or not for everybody ({answer.status})",
            "check the name" + ("" if h.token else ", or set HF_TOKEN to a token that may read it"),
            64,
        )
    if answer.status in PASSES or 500 <= (answer.status or 0) < 600:
        return Finding(
            "hub",
            WARN,
            f"{answer.host} answers {answer.status} just now, of which the run needs {said}",
            "a run asks again for a while; HF_TOKEN raises what the hub allows",
        )
    why = answer.problem or (
        f"it sends elsewhere ({answer.status})"
        if 300 <= (answer.status or 0) < 400
        else f"it answers {answer.status}"
    )
    return Finding(
        "hub",
        FAIL,
        f"{answer.host} is out of reach ({why}), of which the run needs {said}",
        "check the "
        "network and HTTPS_PROXY, name a mirror with HF_ENDPOINT, or bring a DATA_DIR prepared elsewhere",
    )


# ---------------------------------------------------------------------------------------------------
# The clock
# ---------------------------------------------------------------------------------------------------


def clock(answers: Iterable[web.Answer | None], kept: bool | None, matters: bool) -> Finding:
    """By what servers said whose answers came anyway, else by the kernel's word (machine.is_kept), which counts only
    where the time matters: a run of one machine that asks nobody can do without."""
    told = [
        (answer.ahead_s, answer.host) for answer in answers if answer and answer.ahead_s is not None
    ]
    fix = "let chrony or systemd-timesyncd keep it (timedatectl set-ntp true); in a container, on its host"
    if told:
        ahead_s, host = min(told, key=lambda one: abs(one[0]))
        if abs(ahead_s) > CLOCK_S:
            return Finding(
                "clock",
                WARN,
                f"{abs(ahead_s):,.0f} s {'ahead of' if ahead_s > 0 else 'behind'} {host}: "
                "tokens and certificates are refused some minutes off",
                fix,
            )
        return Finding("clock", PASS, f"within {max(1.0, abs(ahead_s)):.0f} s of {host}")
    said = {
        True: "synchronized (NTP)",
        False: "no NTP service found",
        None: "the system does not tell whether it is synchronized (NTP)",
    }[kept]
    if kept is False and matters:
        return Finding("clock", WARN, f"{said}, and no server told how far it is off", fix)
    return Finding("clock", PASS, f"{said}; not compared, since no server was asked")
