"""Settings of the image and of jobs on a cluster, of Kubernetes or Slurm."""

from typing import Annotated

from settings.declare import Count, Format, PathText, Section, section, setting
from settings.targets import CLUSTER, COMPUTE, LAUNCH, PREPARE_DATA, SEND

DNS_LABEL = Format(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "a DNS label")
ObjectName = Annotated[
    str,
    ("format", Format(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", "the name of a Kubernetes object")),
]


@section
class Cluster(Section):
    """Image, pods, volume and namespace."""

    USED_BY = LAUNCH
    NEEDS = "ENGINE=kubernetes"
    NEEDED_BY = SEND

    engine: str = setting(
        "kubernetes",
        "Scheduler of the cluster that `make train-8xa100` and `make finetune-k8s` send a run to.",
        choices=("kubernetes", "slurm"),
        needs="",
        used_by=SEND,
    )
    sbatch_args: str = setting(
        "",
        "Options of sbatch that your site requires, such as a partition, an account and a time "
        "limit. Other settings give those that `make train-8xa100` writes itself.",
        format=Format(
            r"(?!(.* )?--(job-name|nodes|ntasks\S*|output|open-mode|signal|array|export|wrap)\b)"
            r"--[a-z][a-z-]*(=[^\s'\"`$\\]+)?( --[a-z][a-z-]*(=[^\s'\"`$\\]+)?)*",
            "long options with blanks between them, but not --job-name, --nodes, --ntasks..., "
            "--output, --open-mode, --signal, --array, --export or --wrap",
        ),
        example="--partition=gpu --account=lab --time=24:00:00",
        needs="ENGINE=slurm",
        used_by=SEND,
    )
    image: str = setting(
        "",
        "Image repository that `make push` pushes to and pods pull from. "
        "With a tag or digest, pods use that one instead of the newest push.",
        format=Format(
            r"[a-z0-9][a-z0-9._/:-]*(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?",
            "REGISTRY/REPOSITORY, with :TAG or @sha256:DIGEST if needed",
        ),
        example="registry.example.org/lab/pure-transformer",
        used_by=LAUNCH | {"image", "push"},
    )
    where: str = setting(
        "auto",
        "Work on this machine (`local`) or on the cluster (`cluster`). "
        "`auto` chooses the cluster if RUN_NAME was launched there.",
        choices=("auto", "local", "cluster"),
        needs="",
        used_by=CLUSTER | COMPUTE | PREPARE_DATA | {"export"},
    )
    job_name: str = setting(
        "pure-transformer-8xa100",
        "Name of the Kubernetes Job.",
        format=Format(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", "a DNS label of at most 50 characters"),
        used_by=CLUSTER,
    )
    namespace: str = setting(
        "",
        "Kubernetes namespace. Default: the namespace of kubectl's context.",
        format=DNS_LABEL,
        example="my-lab",
        used_by=CLUSTER,
    )
    gpus_per_node: Count | None = setting(
        None,
        "Number of GPUs per pod or node, or of processes with DEVICE=cpu. Default: 2 on the cluster.",
        maximum=64,
        needs="",
    )
    gpu_products: str = setting(
        "NVIDIA-A100-SXM4-80GB,NVIDIA-A100-80GB-PCIe",
        "GPU products to run on. `make sites` lists those of the cluster.",
        format=Format(
            r"[A-Za-z0-9][A-Za-z0-9._-]*(,[A-Za-z0-9][A-Za-z0-9._-]*)*",
            "names of GPU products with commas between them",
        ),
    )
    gpu_resource: str = setting(
        "",
        "Name by which pods request GPUs; some clusters use a separate one for large GPUs. "
        "Default: the name that the nodes of GPU_PRODUCTS advertise, or else nvidia.com/gpu.",
        format=Format(
            r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?",
            "DOMAIN/NAME",
        ),
        example="nvidia.com/a100",
    )
    exclude_nodes: str = setting(
        "",
        "Nodes that pods must not run on, next to those that `make bad-nodes` lists.",
        format=Format(
            r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?(,[a-z0-9]([-a-z0-9.]*[a-z0-9])?)*",
            "names of nodes with commas between them",
        ),
        example="gpu-07.example.org,gpu-12.example.org",
    )
    site: str = setting(
        "",
        "Zone that all pods must run in. `make sites` lists the zones. Default: any zone.",
        format=Format(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", "the value of a label"),
        example="ucsd",
    )
    volume: str = setting(
        "pure-transformer",
        "Name of the PersistentVolumeClaim that holds runs and data. No target ever deletes it.",
        format=DNS_LABEL,
        used_by=CLUSTER,
    )
    volume_gb: Count = setting(
        500, "Size of the volume when it is created.", unit="GiB", maximum=10**6
    )
    storage_class: ObjectName = setting(
        "",
        "Storage class of the volume when it is created. Default: the cluster's.",
        example="rook-cephfs",
    )
    pod_cpus: Count | None = setting(
        None,
        "CPUs of a pod, or of a node under ENGINE=slurm. Default: 4 for each GPU, or less if the "
        "cluster's nodes have less.",
        needs="",
        maximum=1024,
    )
    pod_memory_gb: int | None = setting(
        None,
        "Memory of a pod, or of a node under ENGINE=slurm. A sixth of a pod's is shared memory "
        "(/dev/shm). Default: 48 for each GPU, or less if the cluster's nodes have less; 6 with "
        "DEVICE=cpu.",
        unit="GiB",
        needs="",
        minimum=2,
        maximum=10**5,
        example="96",
    )
    pod_patch: PathText = setting(
        "",
        "File of YAML that is merged into the pods that train: labels, devices, user, tolerations.",
        example="site.yaml",
    )
    tolerations: str = setting(
        "",
        "Taints that the pods tolerate.",
        format=Format(
            r"[A-Za-z0-9][A-Za-z0-9./_-]*(=[A-Za-z0-9._-]+)?"
            r"(,[A-Za-z0-9][A-Za-z0-9./_-]*(=[A-Za-z0-9._-]+)?)*",
            "KEY or KEY=VALUE, with commas between several",
        ),
        example="nautilus.io/hardware=a100",
    )
    priority_class: ObjectName = setting(
        "",
        "PriorityClass of the pods. Default: the cluster's.",
        example="opportunistic",
    )
    image_pull_secret: ObjectName = setting(
        "",
        "Secret of the namespace that holds the credentials for pulling the image.",
        example="registry-login",
    )
    wait: bool = setting(False, "Keep trying until all pods can be scheduled together.")
