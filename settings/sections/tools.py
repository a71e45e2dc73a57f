"""The settings of what is round a run: image, cluster, plan, doctor, monitor. A part of config.py's Config."""

import dataclasses

from settings.declare import setting


@dataclasses.dataclass(frozen=True)
class Outside:
    """What a trainer on this machine does not need to know."""

    # ---- Image
    image: str = setting(
        "",
        help="where make push puts the image and pods find it: a repository, of which pods take "
        "what was pushed last; or with a tag or digest, which they take then",
        pattern=r"[a-z0-9][a-z0-9._/:-]*(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?",
        example="registry.example.org/lab/pure-transformer",
    )
    image_builder: str = setting(
        "auto",
        help="what make image builds with; auto takes the first that is installed",
        choices=("auto", "buildx", "docker", "podman", "buildah"),
    )
    base_image: str = setting(
        "",
        help="to build upon, with Python 3.11 or later on Debian. Default: that of "
        "docker/Dockerfile",
        example="localhost/base:bookworm",
    )
    flash_attn_wheel: str = setting(
        "",
        help="address of a wheel of flash-attn for the image, with its hash behind it",
        pattern=r"(https?|file)://[^#]+\.whl#sha256=[0-9a-f]{64}",
        example="https://example.org/flash_attn-2.8.3-cp311-cp311-linux_x86_64.whl#sha256="
        + 64 * "0",
    )

    # ---- Cluster
    where: str = setting(
        "auto",
        help="whose job status, logs, stop and the like are about, and where make data works; "
        "auto: the cluster's where RUN_NAME was sent there",
        choices=("auto", "local", "cluster"),
    )
    job_name: str = setting(
        "pure-transformer-8xa100",
        help="the Kubernetes Job's name",
        pattern=r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?",
        hint="a DNS label, with room for a suffix",
    )
    namespace: str = setting(
        "",
        help="the Kubernetes namespace. Default: that of kubectl's context",
        pattern=r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?",
        example="my-lab",
    )
    gpus_per_node: int | None = setting(
        None,
        help="GPUs of a pod; processes of one where DEVICE=cpu. Default: 2 in the cluster",
        minimum=1,
        maximum=64,
        example="4",
    )
    gpu_products: str = setting(
        "NVIDIA-A100-SXM4-80GB,NVIDIA-A100-80GB-PCIe",
        help="those that will do, with commas between; make sites lists what there is",
        pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*(,[A-Za-z0-9][A-Za-z0-9._-]*)*",
    )
    site: str = setting(
        "",
        help="the zone that all pods shall be in; make sites lists them. Default: any, the same "
        "one if there is room",
        example="ucsd",
        pattern=r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?",
    )
    storage_class: str = setting(
        "",
        help="of the volume. Default: the cluster's",
        example="rook-cephfs",
        pattern=r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?",
    )
    volume: str = setting(
        "pure-transformer",
        help="the claim that holds runs and data; no target ever deletes it",
        pattern=r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?",
    )
    volume_gb: int = setting(500, help="of that claim, when it is made", unit="GiB", minimum=1)
    pod_memory_gb: int = setting(96, help="of a pod, shared memory included", unit="GiB", minimum=2)
    tolerations: str = setting(
        "",
        help="taints that pods tolerate, as KEY or KEY=VALUE, with commas between",
        pattern=r"[A-Za-z0-9][A-Za-z0-9./_-]*(=[A-Za-z0-9._-]+)?"
        r"(,[A-Za-z0-9][A-Za-z0-9./_-]*(=[A-Za-z0-9._-]+)?)*",
        example="nautilus.io/hardware=a100",
    )
    priority_class: str = setting(
        "",
        help="of the pods. Default: the cluster's",
        example="opportunistic",
        pattern=r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?",
    )
    image_pull_secret: str = setting(
        "",
        help="a Secret of the namespace with which pods fetch the image",
        pattern=r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?",
        example="registry-login",
    )
    peer_stop: str = setting(
        "end",
        help="what a node does when another is told to stop: end as well, or wait for it "
        "to come back, as pods do",
        choices=("end", "wait"),
    )
    wait: bool = setting(False, help="make train-8xa100 tries until all pods find room together")
    dry_run: bool = setting(False, help="print what would be applied, and apply nothing")
    only: str = setting(
        "",
        help="of the lines of make logs: numbers of training, or complaints. Default: all",
        choices=("metrics", "errors"),
        example="metrics",
    )
    step: int | None = setting(
        None,
        help="the checkpoint that make fetch-run brings and make export takes. Default: the newest",
        minimum=1,
        example="1000",
    )

    # ---- Plan and doctor
    cards: str = setting(
        "",
        help="the GPUs that make plan is about, as NUMBERxCARD with commas between, or cpu; here: "
        "those of this machine. Default: the preset's, else those of this machine",
        pattern=r"here|cpu|[1-9][0-9]{0,3}x[a-z0-9-]+(,[1-9][0-9]{0,3}x[a-z0-9-]+)*",
        example="8xa100-80gb-sxm",
        hint="docs/plans.md lists the cards",
    )
    wan_gbit: float = setting(1, help="between two sites, each way", unit="Gbit/s", above=0)
    wan_rtt_ms: float = setting(
        30, help="from one site to another and back", unit="milliseconds", minimum=0
    )
    lan_gbit: float = setting(
        25, help="between nodes of one site, each way", unit="Gbit/s", above=0
    )
    mfu: float | None = setting(
        None,
        help="to plan with, of the cards' peak. Default: what make doctor PROBE=1 "
        "measured for this shape, else the preset's, else what the card is known for",
        unit="per cent",
        above=0,
        maximum=100,
        example="45",
    )
    price_gpu_hour: float | None = setting(
        None,
        help="of one GPU for an hour, in your currency; make plan then says the cost",
        above=0,
        example="2.5",
    )
    price_kwh: float | None = setting(
        None,
        help="of a kWh, in your currency; where the power is yours to pay",
        above=0,
        example="0.3",
    )
    target_hours: float | None = setting(
        None,
        help="the run, or what is left of it, must be through in so much time "
        "from now on, or make plan and make train refuse it and say what would",
        unit="hours",
        above=0,
        example="48",
    )
    target_tokens_per_s: float | None = setting(
        None,
        help="the run must be that fast, or it is refused alike",
        unit="tokens/s",
        above=0,
        example="400000",
    )
    sweep: str = setting(
        "",
        help="make plan compares depths (1 or depth) or numbers of GPUs, and "
        "recommends one. Default: none",
        choices=("depth", "gpus", "1"),
        example="depth",
    )
    json: bool = setting(False, help="make plan and make doctor print JSON")
    probe: bool = setting(
        False,
        help="make doctor measures for a minute: products, memory, disk, links, one real step",
    )
    allow_fail: str = setting(
        "",
        help="checks, with commas between, by the names that make doctor and make plan "
        "print, whose FAIL does not keep a run from starting",
        pattern=r"[a-z0-9-]+(,[a-z0-9-]+)*",
        example="disk,target-hours",
    )

    # ---- Monitor
    interval_ms: float = setting(
        10,
        help="between two samples of the GPU sampler",
        unit="milliseconds",
        minimum=1,
        maximum=1000,
    )
    once: bool = setting(
        False,
        help="make monitor looks once and prints plain text; exit code 1 where something is wrong",
    )
    alert_cmd: str = setting(
        "",
        help="a program that make monitor runs once for each new fault, and at the end of "
        "the run, with a sentence as its one argument",
        example="scripts/my_alert.sh",
    )

    # ---- Plots
    log_dir: str = setting(
        "",
        help="a folder of training logs, of this trainer or others, that make plots turns into "
        "CSV and curves there; docs/logs.md. Default: none, it draws RUN_NAME",
        example="logs",
    )

    # ---- Text
    prompt: str = setting(
        "",
        help="Text that make sample continues, or message that make chat replies to. Default: "
        "standard input; at a terminal make sample begins as the sample at the end of the run "
        "does, and make chat asks for one message after the other",
        example="Hello",
    )
    samples: int = setting(
        1, help="texts that make sample writes, side by side", minimum=1, maximum=1024
    )
    sample_temperature: float = setting(
        0.8,
        help="divides the logits before a token is drawn; 0: always the likeliest",
        minimum=0,
        maximum=100,
    )
    sample_top_k: int = setting(
        50, help="tokens among which one is drawn, the likeliest; 0: all", minimum=0
    )
    sample_top_p: float = setting(
        1,
        help="of the probability: drawn is among the likeliest that make it up",
        above=0,
        maximum=1,
    )

    # ---- WAN lab
    wan_lab: str = setting(
        "link,engine,ratio,training",
        help="parts of make wan-lab, with commas between: link, what "
        "the relay gives; engine, the outer all-reduce alone; ratio, the preset of 1.3B parameters "
        "scaled down; training, four sites that train, one killed, one cut off; loss, DiLoCo beside "
        "DDP on three seeds, half an hour. WAN_GBIT and WAN_RTT_MS are the WAN that it asks for",
        pattern=r"(link|engine|ratio|training|loss)(,(link|engine|ratio|training|loss))*",
    )

    # ---- Benchmark
    gpu_check: str = setting(
        "tests,machine,gpt2,d16,d24,xlarge,runs,rest",
        help="parts of make gpu-check, with commas "
        "in between, each of some 5 to 9 minutes: tests; of the machine; a step of a shape, "
        "beside peers; runs, whole runs of these shapes; rest, what plan, sampler and waste of "
        "BENCH_SHAPES show",
        pattern="{0}(,{0})*".format("(tests|machine|gpt2|d16|d24|xlarge|runs|rest)"),
    )
