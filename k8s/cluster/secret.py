"""The Secret with HF_TOKEN, WANDB_API_KEY and RUN_SECRET: values travel on kubectl's standard input, and nowhere else.

What is set here is sent. What is not is taken from a Secret that is there already, of which no value is ever asked
for. Each key is applied under a manager of its own, so that sending one of them leaves the other as it is; and the
Secret carries no job's name, so that several jobs can have their keys from it. RUN_SECRET, by which the pods of a run
know each other, is made if it is nowhere; where that is not allowed, pods make one in their run's folder.
"""

import base64
import contextlib
import json
import re
import secrets
from typing import Any

from k8s.cluster.kubectl import BAD_ENVIRONMENT, Refused, kubectl, refusal, short
from k8s.cluster.standing import NAME_LABEL, OURS
from settings.config import Config

NAME = "pure-transformer-secrets"  # as k8s/manifests/base/job.yaml has it
KEYS = ("RUN_SECRET", "HF_TOKEN", "WANDB_API_KEY")
MANAGER = "pure-transformer"
NAMES_ONLY = '{{range $name, $value := .data}}{{$name}}{{"\\n"}}{{end}}'


def to_send(c: Config) -> dict[str, str]:
    """Key -> value of those that are set here, in the environment or in ENV_FILE."""
    return {name: value for name in KEYS if (value := getattr(c, name.lower()))}


def keys_there(namespace: str) -> set[str] | None:
    """The names of the keys that the cluster's Secret has; None where that may not be seen."""
    done = kubectl("get", "secret", NAME, "-n", namespace, "-o", f"go-template={NAMES_ONLY}")
    if done.code == 0:
        return set(done.out.split())
    if "(NotFound)" in done.err:
        return set()
    if "(Forbidden)" in done.err:
        return None
    raise refusal(done, ("get", "secret"))


def send(c: Config, namespace: str) -> list[str]:
    """Apply what is set here, and make a RUN_SECRET if there is none. Returns the names of the keys."""
    for name, value in to_send(c).items():
        send_key(name, value, namespace)
    there = keys_there(namespace)
    if c.nodes > 1 and there is not None and "RUN_SECRET" not in there:
        with contextlib.suppress(Refused):
            send_key("RUN_SECRET", secrets.token_hex(32), namespace)
            return ["RUN_SECRET", *to_send(c)]
    return list(to_send(c))


def send_key(name: str, value: str, namespace: str) -> None:
    """Apply one key under a manager of its own. Raises Refused."""
    secret: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": NAME,
            "namespace": namespace,
            "labels": {NAME_LABEL: OURS},
        },
        "data": {name: base64.b64encode(value.encode()).decode()},
    }
    manager = f"{MANAGER}-{name.lower().replace('_', '-')}"
    done = kubectl(
        "apply",
        "--server-side",
        f"--field-manager={manager}",
        "-n",
        namespace,
        "-f",
        "-",
        stdin=json.dumps(secret),
    )
    if done.code and (found := re.search(r'conflicts? with "([^"]+)"', done.err)):
        what = (
            f"that Secret has another {name}, which {found[1]} has put there"
            if f".data.{name}" in done.err
            else f"something else than {name} is {found[1]}'s in that Secret ({short(done.complaint)})"
        )
        raise Refused(
            BAD_ENVIRONMENT,
            f"Secret {NAME}: {what}; leave {name} out here, or delete it: kubectl delete secret {NAME} "
            f"-n {namespace}",
        )
    if done.code:
        raise refusal(done, ("apply", "secret"))


def problems(c: Config, namespace: str, there: set[str] | None) -> list[str]:
    """What will be missing in the pods, as sentences."""
    has_key = "WANDB_API_KEY" in to_send(c) or there is None or "WANDB_API_KEY" in there
    if c.wandb_mode != "online" or has_key:
        return []
    return [
        f"WANDB_MODE=online: pods would have no key, as there is none in Secret {NAME} of namespace "
        f"{namespace}, and what wandb login left here stays here; set WANDB_API_KEY in the environment or "
        "ENV_FILE, or choose WANDB_MODE=offline"
    ]
