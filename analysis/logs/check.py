"""What a run implies of itself: numbers that must agree, and by how much they do not.

tokens/s x step time = tokens of a step, the same in each        total time grows by the step time
"""

import numpy as np

from analysis.runs import Run

# Of the difference of two times in minutes with two decimals, and of a step time with two decimals.
ROUNDING_S = 0.61


def check_run(run: Run) -> list[str]:
    """Return a sentence for each thing that can be checked, with the largest deviation and its step."""
    step = run.columns["step"]
    step_s = run.columns["step_ms"] / 1000
    sentences = []
    batch = run.columns["tokens_per_s"] * step_s
    known = np.isfinite(batch).sum()
    if known:
        median = np.nanmedian(batch)
        off = np.nan_to_num(np.abs(batch / median - 1))
        sentences.append(
            f"tokens/s x step time = {median:,.0f} tokens a step (median of {known:,}); largest "
            f"deviation {100 * off.max():.3f}% at step {step[off.argmax()]:,.0f}"
        )
    off = np.abs(np.diff(run.columns["minutes"]) * 60 - step_s[1:])
    off = np.where(np.diff(step) == 1, off, np.nan)
    known = np.isfinite(off).sum()
    if known and run.folder is None:  # the minutes of a record are the sum of its step times
        sentences.append(
            f"total time grows by the step time on {(off <= ROUNDING_S).sum():,} of {known:,} steps, "
            f"within {ROUNDING_S} s, the rounding of minutes; largest deviation {np.nanmax(off):.2f} s "
            f"at step {step[np.nanargmax(off) + 1]:,.0f}"
        )
    return sentences or ["nothing in this log can be checked against another number of it"]
