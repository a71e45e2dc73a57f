"""The settings of what is round a run: the image, and the cluster that it is sent to. A part of config.py's Config."""

import dataclasses

from train.settings import TRACKED, setting


@dataclasses.dataclass(frozen=True)
class Outside:
    """What a trainer on this machine does not need to know."""

    # ---- Image
    image: str = setting("", help="where make push puts the image and pods find it: a repository, of which pods take "
                         "what was pushed last; or with a tag or digest, which they take then",
                         pattern=r"[a-z0-9][a-z0-9._/:-]*(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?",
                         example="registry.example.org/lab/pure-transformer")
    image_builder: str = setting("auto", help="what make image builds with; auto takes the first that is installed",
                                 choices=("auto", "buildx", "docker", "podman", "buildah"))
    base_image: str = setting("", help="to build upon, with Python 3.11 or later on Debian. Default: that of "
                              "docker/Dockerfile", example="localhost/base:bookworm")
    flash_attn_wheel: str = setting("", help="address of a wheel of flash-attn for the image, with its hash behind it",
                                    pattern=r"(https?|file)://[^#]+\.whl#sha256=[0-9a-f]{64}",
                                    example="https://example.org/flash_attn-2.8.3-cp311-cp311-linux_x86_64.whl#sha256="
                                    + 64 * "0")

    # ---- Cluster
    sync: str = setting("ddp", help="how nodes stay together: in every step", choices=("ddp",), resume=TRACKED,
                        hint="diloco, for sites joined by a WAN, is not in this version yet")
    where: str = setting("auto", help="whose job status, logs, stop and the like are about, and where make data works; "
                         "auto: the cluster's where RUN_NAME was sent there", choices=("auto", "local", "cluster"))
    job_name: str = setting("pure-transformer-8xa100", help="the Kubernetes Job's name",
                            pattern=r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", hint="a DNS label, with room for a suffix")
    namespace: str = setting("", help="the Kubernetes namespace. Default: that of kubectl's context",
                             pattern=r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", example="my-lab")
    overlay: str = setting("auto", help="the manifests, of k8s/overlays; auto: single-node where NODES=1, pinned-site "
                           "where there is a SITE, cpu-smoke where DEVICE=cpu, else nrp",
                           choices=("auto", "nrp", "single-node", "pinned-site", "cpu-smoke"))
    gpus_per_node: int | None = setting(None, help="GPUs of a pod; processes of one where DEVICE=cpu. Default: 2 in "
                                        "the cluster", minimum=1, maximum=64, example="4")
    gpu_products: str = setting("NVIDIA-A100-SXM4-80GB,NVIDIA-A100-80GB-PCIe", help="those that will do, with commas "
                                "between; make sites lists what there is",
                                pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*(,[A-Za-z0-9][A-Za-z0-9._-]*)*")
    gpu_resource: str = setting("nvidia.com/gpu", help="the name by which pods ask for them; some clusters give large "
                                "GPUs one of their own, such as nvidia.com/a100", example="nvidia.com/a100",
                                pattern=r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
    site: str = setting("", help="the zone that all pods shall be in; make sites lists them. Default: any, the same "
                        "one if there is room", example="ucsd",
                        pattern=r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
    storage_class: str = setting("", help="of the volume. Default: the cluster's", example="rook-cephfs",
                                 pattern=r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
    volume: str = setting("pure-transformer", help="the claim that holds runs and data; no target ever deletes it",
                          pattern=r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
    volume_gb: int = setting(500, help="of that claim, when it is made", unit="GiB", minimum=1)
    pod_cpus: int = setting(16, help="of a pod, asked for and allowed alike", unit="cores", minimum=1)
    pod_memory_gb: int = setting(96, help="of a pod, shared memory included", unit="GiB", minimum=2)
    pod_disk_gb: int = setting(50, help="of a pod beside the volume: caches and temporary files", unit="GiB", minimum=2)
    shm_gb: int = setting(16, help="of that memory, for /dev/shm", unit="GiB", minimum=1)
    tolerations: str = setting("", help="taints that pods tolerate, as KEY or KEY=VALUE, with commas between",
                               pattern=r"[A-Za-z0-9][A-Za-z0-9./_-]*(=[A-Za-z0-9._-]+)?"
                               r"(,[A-Za-z0-9][A-Za-z0-9./_-]*(=[A-Za-z0-9._-]+)?)*",
                               example="nautilus.io/hardware=a100")
    priority_class: str = setting("", help="of the pods. Default: the cluster's", example="opportunistic",
                                  pattern=r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
    secret_name: str = setting("pure-transformer-secrets", help="the Secret that keeps HF_TOKEN and WANDB_API_KEY",
                               pattern=r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
    image_pull_secret: str = setting("", help="a Secret of the namespace with which pods fetch the image",
                                     pattern=r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", example="registry-login")
    network: str = setting("auto", help="the settings of NCCL, of k8s/network: for nodes of one site, or of several; "
                           "auto: site where there is a SITE or one node, else wan", choices=("auto", "site", "wan"))
    peer_stop: str = setting("end", help="what a node does when another is told to stop: end as well, or wait for it "
                             "to come back, as pods do", choices=("end", "wait"))
    wait: bool = setting(False, help="make train-8xa100 tries until all pods find room together")
    wait_minutes: float = setting(3, help="between such tries", unit="minutes", above=0)
    dry_run: bool = setting(False, help="print what would be applied, and apply nothing")
    only: str = setting("", help="of the lines of make logs: numbers of training, NCCL's, who joined, or complaints. "
                        "Default: all", choices=("metrics", "nccl", "ranks", "errors"), example="metrics")
    node: int | None = setting(None, help="whose lines make logs shows. Default: the first's", minimum=0, example="0")
    step: int | None = setting(None, help="the checkpoint that make fetch-run brings. Default: the newest", minimum=1,
                               example="1000")
