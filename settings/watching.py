"""Settings of watching, tracking and measuring runs."""

from settings.declare import Format, PathText, Section, section, setting
from settings.run import NAMES, Name
from settings.targets import TRAIN


def one_or_more(*names: str) -> Format:
    """Describe a list of these names."""
    name = f"({'|'.join(names)})"
    return Format(f"{name}(,{name})*", f"one or more of {', '.join(names)}, with commas between")


@section
class Watching(Section):
    """Samples of the GPUs, the monitor, logs and plots."""

    interval_ms: float = setting(
        10,
        "Time between two samples of GPU power and temperature.",
        unit="milliseconds",
        minimum=1,
        maximum=1000,
        used_by={"train-2xh100", "train-8xa100", "finetune-k8s", "restart", "gpu-sampler"},
    )
    once: bool = setting(
        False,
        "Print one snapshot as plain text. The exit code is 1 if something is wrong.",
        used_by={"monitor"},
    )
    alert_cmd: str = setting(
        "",
        "Program that `make monitor` runs for each new fault and at the end of the run. "
        "Its only argument is a sentence.",
        example="scripts/my_alert.sh",
        used_by={"monitor"},
    )
    only: str = setting(
        "",
        "Print only lines with training metrics, or only errors. Default: all lines.",
        choices=("metrics", "errors"),
        example="errors",
        used_by={"logs", "attach"},
    )
    log_dir: str = setting(
        "",
        "A log of this or another trainer, or a folder of logs, to plot instead of RUN_NAME.",
        example="logs",
        used_by={"plots"},
    )
    runs: str = setting(
        "",
        "Runs and logs to compare, with commas between them: names in RUNS_DIR, paths, or patterns "
        "with `*`. Names that differ only in the ending -seedN are seeds of one group.",
        example="base-seed*,muon-seed*",
        used_by={"compare"},
    )
    figure: str = setting(
        "",
        "File for a figure of the losses compared, 3.3 inches wide as a column of a paper.",
        format=Format(r".*[^/]\.(pdf|svg|png)", "a file that ends in .pdf, .svg or .png"),
        example="loss.pdf",
        used_by={"compare"},
    )


@section
class Measuring(Section):
    """Benchmarks."""

    bench_shapes: str = setting(
        "s4k,s50k,checkpoint",
        "Parts of `make bench`: shapes of doctor/gpu_probe/shapes.py, one cell such as "
        "s50k-bfloat16-compiled, a whole run such as run-s4k, or checkpoint, data, sampler, plan, "
        "logs, text, core, waste.",
        format=NAMES,
        used_by={"bench"},
    )
    gpu_check: str = setting(
        "tests,machine,gpt2,d16,d24,xlarge,runs,rest",
        "Parts of `make gpu-check`, each of 5 to 9 minutes.",
        format=one_or_more("tests", "machine", "gpt2", "d16", "d24", "xlarge", "runs", "rest"),
        used_by={"gpu-check"},
    )
    wan_lab: str = setting(
        "link,engine,ratio,training",
        "Parts of `make wan-lab`: what the link gives (link), the outer all-reduce alone (engine), "
        "a model of 1.3B parameters scaled down (ratio), four sites that train while one is killed "
        "and one cut off (training), DiLoCo next to DDP on three seeds (loss).",
        format=one_or_more("link", "engine", "ratio", "training", "loss"),
        used_by={"wan-lab"},
    )
    certify: str = setting(
        "full",
        "How much `make certify` does: `full` takes ten minutes on two cores, `short` two.",
        choices=("full", "short"),
        used_by={"certify"},
    )
    check: PathText = setting(
        "",
        "Certificate that `make certify` checks, instead of making one. "
        "Settings come from the certificate.",
        example="certificate.json",
        used_by={"certify"},
    )


@section
class Tracking(Section):
    """Weights & Biases, other trackers, and the Hugging Face Hub."""

    USED_BY = TRAIN | {"mirror"}

    wandb_mode: str = setting(
        "auto",
        "Send the run to Weights & Biases. `auto` means `online` if there is a key, "
        "and `disabled` otherwise.",
        choices=("auto", "online", "offline", "disabled"),
    )
    wandb_project: Name = setting("pure-transformer", "Project in Weights & Biases.")
    wandb_entity: Name = setting(
        "",
        "Team or user in Weights & Biases. Default: the owner of the key.",
        example="my-team",
        needs="WANDB_MODE!=disabled",
    )
    trackers: str = setting(
        "",
        "Other trackers that follow the run, with commas between them. "
        "Each is a package to install first. Default: none.",
        format=one_or_more("tensorboard", "trackio"),
        example="tensorboard",
    )
    wandb_api_key: str = setting(
        "",
        "API key of Weights & Biases. A key that `wandb login` saved works too.",
        secret=True,
    )
    hf_token: str = setting(
        "",
        "Hugging Face token, for gated data sets and for uploads.",
        secret=True,
        used_by=TRAIN | {"data", "data-report", "eval", "sample", "chat", "upload"},
    )
    hub_repo: str = setting(
        "",
        "Repository on the Hugging Face Hub that `make upload` writes to. It is created, private, "
        "if it does not exist.",
        format=Format(
            r"(?a:(?=.{3,96}$)(?!.*(--|\.\.|\.git$))\w([\w.-]*\w)?/\w([\w.-]*\w)?)",
            "OWNER/NAME of at most 96 letters, digits, '-', '_' and '.'",
        ),
        example="my-name/tiny-python",
        used_by={"upload"},
    )
