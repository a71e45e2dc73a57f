"""Every overlay against Kubernetes' own schemas, and against rules that schemas do not know."""

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from k8s.cluster.job_spec import cluster_config
from k8s.cluster.kubectl import kubectl
from k8s.cluster.render import claim, objects, reader_pod, render
from record.exit_codes import EXIT_CODES, MACHINE_FAULT, NO_PROGRESS, NODES_MISSING
from settings import ROOT
from tests.cluster_sim.cluster import Cluster

IMAGE = "registry.example.org/lab/pure-transformer:v1"
SECRETS = {"HF_TOKEN": "hf-not-to-be-seen", "WANDB_API_KEY": "key-not-to-be-seen"}
SHAPES: dict[str, dict[str, str]] = {
    "nrp": {},
    "nrp-2x4": {
        "NODES": "2",
        "GPUS_PER_NODE": "4",
        "NAMESPACE": "lab",
        "IMAGE_PULL_SECRET": "login",
        "TOLERATIONS": "nautilus.io/hardware=a100,b",
        "PRIORITY_CLASS": "low",
        "STORAGE_CLASS": "a.b",
    },
    "single-node": {"NODES": "1", "GPUS_PER_NODE": "8"},
    "pinned-site": {"SITE": "UCSD.Example_1"},
    "cpu-smoke": {"PRESET": "tiny", "DEVICE": "cpu", "NODES": "2"},
    "diloco": {
        "SYNC": "diloco",
        "TOLERATIONS": "a",
        "IMAGE_PULL_SECRET": "login",
        "NAMESPACE": "lab",
    },
    "diloco on cpu": {
        "SYNC": "diloco",
        "PRESET": "tiny",
        "DEVICE": "cpu",
        "NODES": "2",
        "GPUS_PER_NODE": "1",
        "JOB_NAME": "small",
    },
    "longest diloco": {"SYNC": "diloco", "JOB_NAME": "k" * 50},
    "finetune": {
        "MODEL": "/volume/m",
        "DATA": "an-owner/chats",
        "PRESET": "glm-4.5-air-16xh200",
        "NODES": "2",
    },
    "longest": {
        "JOB_NAME": "j" * 50,
        "NODES": "4096",
        "GPUS_PER_NODE": "1",
        "BATCH_TOKENS": str(4096 * 2048),
    },
}
Things = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Shape -> the YAML of its run, its data Job and its claim, made while there are secrets in the environment."""
    own = tmp_path_factory.mktemp("own") / "own.env"
    own.write_text("")
    made = {}
    for name, settings in SHAPES.items():
        c, _ = cluster_config({"ENV_FILE": str(own), **SECRETS, **settings})
        made[name] = render(c, IMAGE)
        made[f"{name}: data"] = render(c, IMAGE, data_job=True)
        made[f"{name}: claim"] = claim(c)
        made[f"{name}: reader"] = json.dumps(reader_pod(c, IMAGE, f"{c.job_name}-reader"))
    return made


# ---- Schemas


@pytest.mark.parametrize("version", ["1.29", "1.32", "1.37"])
def test_the_api_knows_every_field(rendered: dict[str, str], version: str) -> None:
    checked = 0
    for text in rendered.values():
        for thing in objects(text):
            kubernetes_validate.validate(thing, version, strict=True)
            checked += 1
    assert checked == sum(map(len, map(objects, rendered.values()))) > 4 * len(SHAPES)


def test_the_api_takes_every_shape_and_changes_nothing_when_it_is_sent_again(
    rendered: dict[str, str], cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    names = [
        f"{shape}{part}"
        for shape in ("nrp", "longest", "diloco on cpu", "longest diloco")
        for part in (": claim", "", ": data", ": reader")
    ]
    for name in names:
        for _ in range(2):
            done = kubectl("apply", "--server-side", "-f", "-", stdin=rendered[name])
            assert done.code == 0, (name, done.err)
    sent = {
        (thing["kind"], thing["metadata"]["name"])
        for name in names
        for thing in objects(rendered[name])
    }
    assert {
        (kind, thing["metadata"]["name"])
        for kind in {kind for kind, _ in sent}
        for thing in cluster.objects(kind)
    } >= sent
    job = next(
        thing
        for thing in cluster.objects("Job")
        if thing["metadata"]["name"] == "pure-transformer-8xa100"
    )
    assert job["metadata"]["generation"] == 1


def test_a_field_that_is_not_there_would_be_noticed(rendered: dict[str, str]) -> None:
    job = next(thing for thing in objects(rendered["nrp"]) if thing["kind"] == "Job")
    job["spec"]["backofLimit"] = 4
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.32", strict=True)


# ---- Rules


def problems(things: Things) -> set[str]:
    """What is wrong with objects that are to be applied together, in a word or two each."""
    found = {
        f"name {thing['metadata']['name']}"
        for thing in things
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", thing["metadata"]["name"])
        and thing["kind"] != "ConfigMap"
    }  # which may be longer
    kinds = {thing["kind"]: thing for thing in things if not is_lighthouse(thing)}
    beside = {thing["kind"]: thing for thing in things if is_lighthouse(thing)}
    for job in (thing for thing in things if thing["kind"] == "Job"):
        found |= pod_problems(job["spec"]["template"]["spec"])
    if "Job" in kinds:
        found |= job_problems(kinds["Job"], kinds)
        several = (
            "subdomain" in kinds["Job"]["spec"]["template"]["spec"]
        )  # and not the one of make data
        if several and kinds["ConfigMap"]["data"].get("SYNC") == "diloco":
            found |= site_problems(kinds, beside)
    for pod in (thing for thing in things if thing["kind"] == "Pod"):
        found |= pod_problems(pod["spec"])
    return found


def job_problems(job: dict[str, Any], kinds: dict[str, Any]) -> set[str]:
    spec, template, found = job["spec"], job["spec"]["template"], set()
    labels, pod = template["metadata"]["labels"].items(), template["spec"]
    policy = kinds["NetworkPolicy"]["spec"]
    if not policy["podSelector"]["matchLabels"].items() <= labels:
        found.add("the policy is of other pods")
    if not policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"].items() <= labels:
        found.add("the policy lets others in")
    if "subdomain" in pod:
        service = kinds.get("Service", {"metadata": {"name": ""}, "spec": {"selector": {}}})
        environment, first = (
            kinds["ConfigMap"]["data"],
            f"{job['metadata']['name']}-0.{pod['subdomain']}",
        )
        if (
            service["metadata"]["name"] != pod["subdomain"]
            or not service["spec"]["selector"].items() <= labels
        ):
            found.add("the Service is of other pods")
        if environment.get("MASTER_ADDR", first) != first:
            found.add("pods look for another first one")
        if service["spec"].get("clusterIP") != "None" or not service["spec"].get(
            "publishNotReadyAddresses"
        ):
            found.add("pods have no names before they are ready")
    wishes = pod.get("affinity", {}).get("podAffinity", {})
    for term in wishes.get("preferredDuringSchedulingIgnoredDuringExecution", []):
        if not term["podAffinityTerm"]["labelSelector"]["matchLabels"].items() <= labels:
            found.add("near to other pods")
    if spec["completions"] != spec["parallelism"]:
        found.add("not all pods at once")
    if pod["restartPolicy"] != "Never" or spec["podReplacementPolicy"] != "Failed":
        found.add("the API refuses a policy by exit codes so")
    rules = spec["podFailurePolicy"]["rules"]
    named = {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule}
    if not named <= {container["name"] for container in pod["containers"]}:
        found.add("a rule is about no container")
    if [rule["action"] for rule in rules] != [
        "Ignore",
        "FailJob",
        "Ignore",
    ] or "activeDeadlineSeconds" in spec:
        found.add("the Job ends otherwise than it should")
    if (
        pod["containers"][0]["envFrom"][0]["configMapRef"]["name"]
        != kinds["ConfigMap"]["metadata"]["name"]
    ):
        found.add("another ConfigMap")
    return found


def is_lighthouse(thing: dict[str, Any]) -> bool:
    return thing["metadata"].get("labels", {}).get("app.kubernetes.io/component") == "lighthouse"


def site_problems(kinds: dict[str, Any], beside: dict[str, Any]) -> set[str]:
    """What keeps sites from finding each other: names that lead nowhere, ports, and policies."""
    job, settings, found = kinds["Job"]["spec"], kinds["ConfigMap"]["data"], set()
    here = job["template"]["metadata"]["labels"]
    if int(settings["SITES"]) != job["completions"]:
        found.add("not a site a pod")
    if set(beside) != {"Job", "Service"}:
        return found | {"no lighthouse"}
    there, service = beside["Job"]["spec"]["template"], beside["Service"]["spec"]
    host, _, port = settings["LIGHTHOUSE"].partition(":")
    if host != beside["Service"]["metadata"]["name"] or not service["publishNotReadyAddresses"]:
        found.add("the lighthouse has no such name")
    open_ports = {one["containerPort"] for one in there["spec"]["containers"][0]["ports"]}
    if {one["port"] for one in service["ports"]} != {int(port), int(port) + 1} or open_ports != {
        one.get("targetPort", one["port"]) for one in service["ports"]
    }:
        found.add("the lighthouse has other ports")
    if (
        not service["selector"].items() <= there["metadata"]["labels"].items()
        or service["selector"].items() <= here.items()
    ):
        found.add("the name leads to other pods")
    if kinds["Service"]["spec"]["selector"].items() <= there["metadata"]["labels"].items():
        found.add("the lighthouse is taken for a site")
    policy = kinds["NetworkPolicy"]["spec"]
    callers = [
        peer["podSelector"]["matchLabels"].items()
        for rule in policy["ingress"]
        for peer in rule["from"]
        if "ports" not in rule
    ]
    for labels in (here, there["metadata"]["labels"]):
        if not policy["podSelector"]["matchLabels"].items() <= labels.items():
            found.add("no policy holds others off")
        if not any(caller <= labels.items() for caller in callers):
            found.add("a policy keeps pods of the job apart")
    if there["spec"]["containers"][0]["envFrom"] != [
        {"configMapRef": {"name": kinds["ConfigMap"]["metadata"]["name"]}}
    ]:
        found.add("the lighthouse has other settings")
    if there["spec"]["restartPolicy"] != "OnFailure" or "podFailurePolicy" in beside["Job"]["spec"]:
        found.add("the lighthouse does not come back")
    return found


def pod_problems(pod: dict[str, Any]) -> set[str]:
    """Pod Security's restricted profile, and what keeps a pod from starting."""
    found, context = set(), pod["securityContext"]
    if (
        not context["runAsNonRoot"]
        or 0 in (context["runAsUser"], context["runAsGroup"])
        or context["seccompProfile"]["type"] != "RuntimeDefault"
    ):
        found.add("not restricted")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    if any(set(volume) & {"hostPath", "secret"} for volume in volumes.values()) or pod.get(
        "hostNetwork"
    ):
        found.add("not restricted")
    for container in pod["containers"]:
        own = container["securityContext"]
        if (
            own["allowPrivilegeEscalation"]
            or own["capabilities"]["drop"] != ["ALL"]
            or not own["readOnlyRootFilesystem"]
        ):
            found.add("not restricted")
        mounted = [mount["name"] for mount in container["volumeMounts"]]
        places = {mount["mountPath"] for mount in container["volumeMounts"]}
        if sorted(mounted) != sorted(volumes) or len(places) != len(mounted):
            found.add("mounts")
        resources = container["resources"]
        if (
            resources["requests"] != resources["limits"]
            or not {"cpu", "memory", "ephemeral-storage"} <= set(resources["limits"])
            or not all(isinstance(amount, str) for amount in resources["limits"].values())
        ):
            found.add("resources")
        shared = [
            volume["emptyDir"]
            for volume in volumes.values()
            if volume.get("emptyDir", {}).get("medium")
        ]
        if any(
            int(each["sizeLimit"][:-2]) >= int(resources["limits"]["memory"][:-2])
            for each in shared
        ):
            found.add("shared memory beyond memory")
    if pod["automountServiceAccountToken"] or pod["enableServiceLinks"]:
        found.add("knows the API")
    return found


def test_every_shape_keeps_the_rules(rendered: dict[str, str]) -> None:
    assert {
        name: found for name, text in rendered.items() if (found := problems(objects(text)))
    } == {}


def damage(path: str, value: Any) -> Callable[[Things], None]:
    """Set a field, found by kind and then by keys, or delete it (value ...)."""

    def apply(things: Things) -> None:
        kind, *keys = path.split(".")
        at: Any = next(thing for thing in things if thing["kind"] == kind)
        for key in keys[:-1]:
            at = at[int(key) if key.isdigit() else key]
        last = int(keys[-1]) if keys[-1].isdigit() else keys[-1].replace("|", ".")
        if value is ...:
            del at[last]
        else:
            at[last] = value

    return apply


POD, TRAINER = "Job.spec.template.spec", "Job.spec.template.spec.containers.0"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("Job.metadata.name", "Upper", "name Upper"),
        (
            "NetworkPolicy.spec.podSelector.matchLabels.app|kubernetes|io/instance",
            "x",
            "the policy is of other pods",
        ),
        ("Service.metadata.name", "x", "the Service is of other pods"),
        ("Service.spec.selector.app|kubernetes|io/instance", "x", "the Service is of other pods"),
        ("Service.spec.publishNotReadyAddresses", ..., "pods have no names before they are ready"),
        ("ConfigMap.data.MASTER_ADDR", "x", "pods look for another first one"),
        ("ConfigMap.metadata.name", "x", "another ConfigMap"),
        ("Job.spec.parallelism", 1, "not all pods at once"),
        (f"{POD}.restartPolicy", "OnFailure", "the API refuses a policy by exit codes so"),
        (
            "Job.spec.podFailurePolicy.rules.1.onExitCodes.containerName",
            "x",
            "a rule is about no container",
        ),
        ("Job.spec.activeDeadlineSeconds", 5, "the Job ends otherwise than it should"),
        (
            f"{POD}.affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution.0.podAffinityTerm.labelSelector"
            ".matchLabels.app|kubernetes|io/instance",
            "x",
            "near to other pods",
        ),
        (f"{POD}.securityContext.runAsUser", 0, "not restricted"),
        (f"{TRAINER}.securityContext.readOnlyRootFilesystem", False, "not restricted"),
        (f"{TRAINER}.volumeMounts.0", ..., "mounts"),
        (f"{TRAINER}.resources.limits.cpu", "17", "resources"),
        (f"{TRAINER}.resources.limits.nvidia|com/gpu", 2, "resources"),
        (f"{POD}.volumes.2.emptyDir.sizeLimit", "96Gi", "shared memory beyond memory"),
        (f"{POD}.automountServiceAccountToken", True, "knows the API"),
    ],
)
def test_a_rule_that_is_broken_is_noticed(
    rendered: dict[str, str], path: str, value: Any, said: str
) -> None:
    things = copy.deepcopy(objects(rendered["nrp"]))
    damage(path, value)(things)
    assert said in problems(things)


OF_SITES, AT = "app|kubernetes|io", "spec.template.spec.containers.0"


@pytest.mark.parametrize(
    ("beside", "path", "value", "said"),
    [
        (False, "ConfigMap.data.SITES", "3", "not a site a pod"),
        (False, "ConfigMap.data.LIGHTHOUSE", "lighthouse:29510", "the lighthouse has no such name"),
        (
            False,
            "ConfigMap.data.LIGHTHOUSE",
            "pure-transformer-8xa100-lighthouse:29511",
            "the lighthouse has other ports",
        ),
        (True, "Service.spec.ports.1.port", 29512, "the lighthouse has other ports"),
        (True, f"Job.{AT}.ports.0.containerPort", 29500, "the lighthouse has other ports"),
        (
            True,
            f"Service.spec.selector.{OF_SITES}/component",
            "trainer",
            "the name leads to other pods",
        ),
        (
            True,
            f"Job.spec.template.metadata.labels.{OF_SITES}/component",
            "trainer",
            "the lighthouse is taken for a site",
        ),
        (
            True,
            f"Job.spec.template.metadata.labels.{OF_SITES}/instance",
            "x",
            "a policy keeps pods of the job apart",
        ),
        (
            False,
            f"NetworkPolicy.spec.podSelector.matchLabels.{OF_SITES}/component",
            "trainer",
            "no policy holds others off",
        ),
        (
            False,
            f"NetworkPolicy.spec.ingress.0.from.0.podSelector.matchLabels.{OF_SITES}/component",
            "trainer",
            "a policy keeps pods of the job apart",
        ),
        (
            False,
            "NetworkPolicy.spec.ingress.0.ports",
            [{"port": 29510}],
            "a policy keeps pods of the job apart",
        ),
        (True, f"Job.{AT}.envFrom.0.configMapRef.name", "x", "the lighthouse has other settings"),
        (
            True,
            "Job.spec.template.spec.restartPolicy",
            "Never",
            "the lighthouse does not come back",
        ),
        (True, f"Job.{AT}.securityContext.readOnlyRootFilesystem", False, "not restricted"),
    ],
)
def test_a_rule_of_several_sites_that_is_broken_is_noticed(
    rendered: dict[str, str], beside: bool, path: str, value: Any, said: str
) -> None:
    things = copy.deepcopy(objects(rendered["diloco"]))
    damage(path, value)([thing for thing in things if is_lighthouse(thing) == beside])
    assert said in problems(things)


def test_sites_without_a_lighthouse_are_noticed(rendered: dict[str, str]) -> None:
    things = [thing for thing in objects(rendered["diloco"]) if not is_lighthouse(thing)]
    assert problems(things) == {"no lighthouse"}


# ---- Exit codes, secrets, and the files themselves


def test_the_job_ends_at_once_by_codes_that_the_launcher_really_gives(
    rendered: dict[str, str],
) -> None:
    ends = {code for code, row in EXIT_CODES.items() if row.ends_job and code}
    for name, text in rendered.items():
        for job in (
            thing for thing in objects(text) if thing["kind"] == "Job" and not is_lighthouse(thing)
        ):
            disrupted, rule, ignored = job["spec"]["podFailurePolicy"]["rules"]
            codes = set(rule["onExitCodes"]["values"])
            # another try may mend 75, 143, and any other; of a site 70 too, which the others do without meanwhile
            of_sites = job["metadata"]["annotations"].get("pure-transformer/sync") == "diloco"
            assert codes == (ends - {NO_PROGRESS} if of_sites else ends), name
            assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
            assert ignored["onExitCodes"]["values"] == [NODES_MISSING, MACHINE_FAULT]


def test_no_secret_is_in_anything_that_is_sent(rendered: dict[str, str]) -> None:
    assert len(rendered) == 4 * len(SHAPES)
    assert [name for name, text in rendered.items() if "not-to-be-seen" in text] == []
    assert not [
        name for name, text in rendered.items() if "kind: Secret" in text or "'Secret'" in text
    ]


def test_yamllint_has_nothing_to_say() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "yamllint", "--strict", "--config-file", "k8s/.yamllint", "k8s"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_every_manifest_is_used() -> None:
    """By a kustomization or by render.py; a file that nobody reads would be changed in vain."""
    written = {
        path.relative_to(ROOT / "k8s" / "manifests").as_posix()
        for path in (ROOT / "k8s" / "manifests").rglob("*.yaml")
    }
    used = {
        f"fields/{name}.yaml"
        for name in re.findall(r'"(\w+)"', (ROOT / "k8s" / "cluster" / "render.py").read_text())
    }
    for path in (ROOT / "k8s").rglob("kustomization.yaml"):
        folder = path.parent.relative_to(ROOT / "k8s" / "manifests").as_posix()
        used |= {f"{folder}/{name}" for name in re.findall(r"[\w-]+\.yaml", path.read_text())}
        used.add(f"{folder}/kustomization.yaml")
    assert written - used == set()


def test_render_leaves_the_repository_as_it_is(rendered: dict[str, str]) -> None:
    assert (
        not list(Path(ROOT / "k8s").rglob("values.yaml"))
        and not (ROOT / "k8s" / "manifests" / "kustomization.yaml").exists()
    )
