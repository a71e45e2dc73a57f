"""The panels that the page and the figure draw, and the colors and dashes of their lines."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One diagram with a line per run.

    Attributes:
        title: with the unit.
        column: of the steps, the evaluations or the samples.
        kind: what it draws: "steps", "evals", the "difference" of a column from the first run, or "samples".
        x: "step" or "minutes" of training, where the reader does not choose another axis.
        is_log: with a logarithmic y axis.
        starts_at_zero: so that a dip looks as deep as it is.
        is_smoothed: with a moving mean.
        has_evals: with the validation loss as points.
        low, high: columns between which samples lie.
    """

    title: str
    column: str
    kind: str = "steps"
    x: str = "step"
    is_log: bool = False
    starts_at_zero: bool = False
    is_smoothed: bool = False
    has_evals: bool = False
    low: str = ""
    high: str = ""


PANELS = (
    Panel("Loss (nats per token)", "loss", is_smoothed=True, has_evals=True),
    Panel("Loss (nats per token)", "loss", x="minutes", is_smoothed=True, has_evals=True),
    Panel("Validation loss (nats per token)", "val_loss", "evals"),
    Panel("Validation, bits per byte", "val_bpb", "evals"),
    Panel("CORE (mean centered accuracy of 22 tasks)", "core", "evals"),
    Panel("Mean centered accuracy of the CORE tasks available", "core_partial", "evals"),
    Panel(
        "Loss minus the first run's loss (nats per token)", "loss", "difference", is_smoothed=True
    ),
    Panel(
        "Throughput (tokens/s, whole job)", "tokens_per_s", starts_at_zero=True, is_smoothed=True
    ),
    Panel("MFU (% of peak)", "mfu", starts_at_zero=True, is_smoothed=True),
    Panel("Learning rate", "lr", starts_at_zero=True),
    Panel(
        "Gradient norm before clipping (logarithmic)", "grad_norm", is_log=True, is_smoothed=True
    ),
    Panel(
        "Power per GPU (W: mean, lowest and highest)",
        "power_w",
        "samples",
        starts_at_zero=True,
        low="power_low_w",
        high="power_high_w",
    ),
    Panel(
        "Energy of all GPUs (kWh since the first sample)",
        "energy_kwh",
        "samples",
        starts_at_zero=True,
    ),
    Panel("Network, received (MB/s)", "in_mb_s", "samples", starts_at_zero=True),
    Panel("Network, sent (MB/s)", "out_mb_s", "samples", starts_at_zero=True),
)

# Ten colors, each with a contrast of 3 against its background. Chosen by a search for the largest distance between any
# two, for people with normal color vision, with protanopia and with deuteranopia (Machado et al. 2009).
COLORS = {
    "light": (
        "#0072b2",
        "#d55e00",
        "#69001e",
        "#00a587",
        "#7887ff",
        "#2d2d69",
        "#b4001e",
        "#4b3cff",
        "#784b69",
        "#0000c3",
    ),
    "dark": (
        "#56b4e9",
        "#e1783c",
        "#f00087",
        "#00d2a5",
        "#4b4bff",
        "#fff096",
        "#965a00",
        "#b4d200",
        "#96f0ff",
        "#1e87b4",
    ),
}
VALIDATION_COLOR = 1  # of the evaluations of a run that is drawn alone: its line has the first
DASHES = ("solid", "dashed", "dotted", "dashdot")


def choose_line(number: int) -> tuple[int, str]:
    """Return the color and dash of a line; no two of the first 40 share both."""
    count = len(COLORS["light"])
    return number % count, DASHES[(number + number // count) % len(DASHES)]
