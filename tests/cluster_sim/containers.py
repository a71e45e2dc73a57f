"""What a container sees, on this machine: the image's files, its environment, its volumes, and the names of its peers.

There is no container here: paths of the manifest become paths of this machine where they stand in the command or in the
environment, and every pod has the address 127.0.0.1. What a program prints is not turned back.
"""

import base64
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cluster_sim.kinds import kind_of
from tests.cluster_sim.store import Refusal, Thing

if TYPE_CHECKING:
    from tests.cluster_sim.cluster import Cluster
    from tests.cluster_sim.kubelet import Ports

ROOT = Path(__file__).resolve().parent.parent.parent
DEBIAN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TINI = ("tini", "/usr/bin/tini", "/sbin/tini")


class NotYet(Exception):
    """The container cannot be made: the reason that its state gives, and why."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class Image:
    """What make image puts together, without building it: the files that .dockerignore lets in, ENV and the entry."""

    def __init__(self, folder: Path):
        self.app = folder / "app"
        for line in (ROOT / ".dockerignore").read_text().splitlines():
            if line.startswith("!"):
                for path in ROOT.glob(line[1:].strip()):
                    if path.is_file():
                        copy = self.app / path.relative_to(ROOT)
                        copy.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy2(path, copy)
        (self.app / "REVISION").write_text("0" * 40 + "\n")
        text = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
        self.environment = {"PATH": DEBIAN_PATH}
        for line in re.findall(r"^ENV (.*)", text, re.MULTILINE):
            for name, _, value in (word.partition("=") for word in shlex.split(line)):
                self.environment[name] = value.replace("${PATH}", self.environment["PATH"])
        self.entry = [
            word
            for name in ("ENTRYPOINT", "CMD")
            for found in re.findall(rf"^{name} (\[.*\])", text, re.MULTILINE)[-1:]
            for word in json.loads(found)
        ]


class Paths:
    """Turns the paths of a container, wherever they stand in a text, into this machine's."""

    def __init__(self, places: dict[str, Path]):
        self.places = {path.rstrip("/"): str(place) for path, place in places.items()}
        choices = "|".join(re.escape(path) for path in sorted(self.places, key=len, reverse=True))
        self.pattern = re.compile(rf"(?<![\w./-])({choices})(?![\w.-])")

    def here(self, text: str) -> str:
        return self.pattern.sub(lambda found: self.places[found[1]], text)


class Sandbox:
    """The container of a pod, ready to run commands in. Raises NotYet."""

    def __init__(
        self,
        cluster: "Cluster",
        pod: Thing,
        image: Image,
        folder: Path,
        claims: Path,
        ports: "Ports",
        extra: dict[str, str],
    ):
        self.cluster, self.pod, self.namespace = cluster, pod, pod["metadata"]["namespace"]
        self.container = pod["spec"]["containers"][0]
        self.image = image
        mounted = {mount["name"]: mount for mount in self.container.get("volumeMounts", [])}
        places = {"/app": image.app, "/opt/venv": Path(sys.prefix)}
        for volume in pod["spec"].get("volumes", []):
            place = self.volume(volume, folder, claims)
            if volume["name"] in mounted:
                mount = mounted[volume["name"]]
                places[mount["mountPath"]] = place / mount.get("subPath", "")
                places[mount["mountPath"]].mkdir(parents=True, exist_ok=True)
        self.paths = Paths(places)
        named = self.named_variables()
        self.environment = {
            name: self.paths.here(value) for name, value in (image.environment | named).items()
        }
        # A program that nobody told another place uses /tmp, which is the pod's own.
        self.environment["TMPDIR"] = self.environment.get("TMPDIR", self.paths.here("/tmp"))
        if named.get("MASTER_ADDR"):
            self.environment |= self.rendezvous(named, ports)
        if named.get("LIGHTHOUSE"):
            self.environment |= self.meeting(named, ports)
        self.environment |= extra
        self.environment["HOSTNAME"] = pod["spec"].get("hostname", pod["metadata"]["name"])
        self.folder = self.paths.here(self.container.get("workingDir", "/app"))

    def command(self) -> list[str]:
        """What the container runs, without tini: this machine has another first process."""
        argv = self.container.get(
            "command", self.image.entry[:-1] if "args" in self.container else self.image.entry
        )
        argv = [
            self.expand(word, self.environment) for word in [*argv, *self.container.get("args", [])]
        ]
        if argv[0] not in TINI:
            return [self.paths.here(word) for word in argv]
        last = next(
            (at for at, word in enumerate(argv) if at and not word.startswith("-")), len(argv)
        )
        return [self.paths.here(word) for word in argv[last:]]

    # ---- Volumes
    def volume(self, volume: Thing, folder: Path, claims: Path) -> Path:
        """Where a volume lies here."""
        if "persistentVolumeClaim" in volume:
            place = claims / volume["persistentVolumeClaim"]["claimName"]
        else:
            place = folder / volume["name"]
            for kind, field in (("ConfigMap", "configMap"), ("Secret", "secret")):
                if field in volume:
                    name = volume[field].get("name") or volume[field]["secretName"]
                    found = self.find(
                        kind,
                        name,
                        f'MountVolume.SetUp failed for volume "{volume["name"]}": '
                        f'{kind.lower()} "{name}" not found',
                        volume[field].get("optional"),
                        "ContainerCreating",
                    )
                    place.mkdir(parents=True, exist_ok=True)
                    for key, value in self.data_of(found).items():
                        (place / key).write_text(value)
        place.mkdir(parents=True, exist_ok=True)
        return place

    def find(
        self,
        kind: str,
        name: str,
        words: str,
        optional: Any = False,
        reason: str = "CreateContainerConfigError",
    ) -> Thing | None:
        try:
            return self.cluster.store.find(kind_of(kind), self.namespace, name)
        except Refusal:
            if optional:
                return None
            raise NotYet(reason, words) from None

    @staticmethod
    def data_of(thing: Thing | None) -> dict[str, str]:
        """What a ConfigMap or a Secret holds."""
        data = (thing or {}).get("data", {})
        secret = thing is not None and thing["kind"] == "Secret"
        return {
            name: base64.b64decode(value).decode() if secret else value
            for name, value in data.items()
        }

    # ---- Environment
    def named_variables(self) -> dict[str, str]:
        """As envFrom and env say, in that order."""
        found: dict[str, str] = {}
        for source in self.container.get("envFrom", []):
            for kind, field in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
                if field in source:
                    name = source[field]["name"]
                    thing = self.find(
                        kind,
                        name,
                        f'{kind.lower()} "{name}" not found',
                        source[field].get("optional"),
                    )
                    found |= {
                        source.get("prefix", "") + key: value
                        for key, value in self.data_of(thing).items()
                    }
        for variable in self.container.get("env", []):
            value_from = variable.get("valueFrom")
            value = (
                self.expand(variable.get("value", ""), found)
                if value_from is None
                else self.value_of(value_from)
            )
            if value is not None:
                found[variable["name"]] = value
        return found

    def value_of(self, source: Thing) -> str | None:
        if "fieldRef" in source:
            path = source["fieldRef"]["fieldPath"]
            named = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
            if named:
                return str(self.pod["metadata"].get(named[1], {}).get(named[2], ""))
            if path in ("status.podIP", "status.hostIP"):
                return "127.0.0.1"
            value: Any = self.pod
            for part in path.split("."):
                value = value.get(part, "")
            return str(value)
        for kind, field in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
            if field in source:
                reference = source[field]
                words = f"couldn't find key {reference['key']} in {kind} {self.namespace}/{reference['name']}"
                data = self.data_of(
                    self.find(kind, reference["name"], words, reference.get("optional"))
                )
                if reference["key"] not in data and not reference.get("optional"):
                    raise NotYet("CreateContainerConfigError", words)
                return data.get(reference["key"])
        raise NotYet("CreateContainerConfigError", f"not in this kubelet: {', '.join(source)}")

    @staticmethod
    def expand(text: str, variables: dict[str, str]) -> str:
        """Put in what $(NAME) stands for, where there is such a variable."""
        return re.sub(
            r"\$\(([A-Za-z_]\w*)\)", lambda found: variables.get(found[1], found[0]), text
        )

    # ---- Peers
    def meeting(self, named: dict[str, str], ports: "Ports") -> dict[str, str]:
        """The lighthouse's address as it is on this machine, as far as the cluster's DNS would know its name, and its
        policies let the job's pods reach it. Raises NotYet where the Service is still to
        come: a program in a cluster asks for its name again, and here it is told once."""
        address = named["LIGHTHOUSE"]
        if self.serves(address):
            return {"LIGHTHOUSE": f"127.0.0.1:{ports.pair(address)}"}
        return {}

    def serves(self, address: str) -> bool:
        """Whether HOST:PORT, and the port behind it, is a Service that leads to a pod of some Job, ready or not, which
        takes calls of this one."""
        host, _, port = address.partition(":")
        service = (
            self.find("Service", host, f"no such name: {host}", reason="ContainerCreating") or {}
        )["spec"]
        ports, mine = (
            {one["port"]: one["targetPort"] for one in service["ports"]},
            self.pod["metadata"]["labels"],
        )
        asked = (int(port), int(port) + 1)
        behind = [
            labels
            for job in self.cluster.store.list(kind_of("Job"), self.namespace)
            if service["selector"].items()
            <= (labels := job["spec"]["template"]["metadata"]["labels"]).items()
        ]
        if not behind:  # the Service is applied before it
            raise NotYet("ContainerCreating", f"no pods yet behind {host}")
        return bool(
            service.get("publishNotReadyAddresses")
            and [ports.get(one) for one in asked] == [*asked]
            and len(behind) == 1
            and self.lets_in(behind[0], mine)
        )

    def lets_in(self, to: dict[str, str], caller: dict[str, str]) -> bool:
        """Whether the namespace's policies let pods of some labels be called on any port by those of others."""
        policies = [
            policy["spec"]
            for policy in self.cluster.store.list(kind_of("NetworkPolicy"), self.namespace)
            if policy["spec"]["podSelector"].get("matchLabels", {}).items() <= to.items()
        ]
        return not policies or any(
            peer["podSelector"].get("matchLabels", {}).items() <= caller.items()
            for policy in policies
            for rule in policy.get("ingress", [])
            if "ports" not in rule
            for peer in rule.get("from", [])
        )

    def rendezvous(self, named: dict[str, str], ports: "Ports") -> dict[str, str]:
        """The address and port of the first pod as it is on this machine, if the cluster's DNS would know its name."""
        address = named["MASTER_ADDR"]
        job = self.pod["metadata"].get("labels", {}).get("batch.kubernetes.io/job-name", "")
        if not self.resolves(address, f"{job}-0"):
            return {}
        return {"MASTER_ADDR": f"127.0.0.1:{ports.pair(address)}"}

    def resolves(self, address: str, name: str) -> bool:
        """Whether HOST.SUBDOMAIN is this Job's pod of a name, by a headless Service, also before it is ready."""
        host, _, subdomain = address.partition(".")
        try:
            service = self.cluster.store.find(kind_of("Service"), self.namespace, subdomain)["spec"]
        except Refusal:
            return False
        return bool(
            host == name
            and self.pod["spec"].get("subdomain") == subdomain
            and service.get("clusterIP") == "None"
            and service.get("publishNotReadyAddresses")
            and service.get("selector", {}).items() <= self.pod["metadata"]["labels"].items()
        )


def members(uid: str) -> list[int]:
    """The processes of a pod, wherever they have gone: each has inherited its mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark(uid).encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                pass  # it has ended, or is another user's
    return [pid for pid in found if pid != os.getpid()]


def mark(uid: str) -> str:
    """The variable that all processes of a pod have."""
    return f"POD_UID_OF_TEST={uid}"
