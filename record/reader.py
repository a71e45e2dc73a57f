"""The names that rooms used before record/metrics.py. Only rooms that have not moved import this."""

from record.metrics import EVAL_KEYS as EVAL_UNITS
from record.metrics import GOES_BACK, SCHEMA, duration, figures, to_console, to_json
from record.metrics import keep_final_steps as last_of_each_step
from record.metrics import read_records as read
from record.metrics import replace_nonfinite as finite

__all__ = [
    "EVAL_UNITS",
    "GOES_BACK",
    "SCHEMA",
    "duration",
    "figures",
    "finite",
    "last_of_each_step",
    "read",
    "to_console",
    "to_json",
]
