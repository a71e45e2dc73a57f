"""Evaluate a run's checkpoint on as many processes as training takes: `make eval`.

Measures validation loss, bits per byte and CORE, or how a fine-tuned run answers EVAL_DATA.
"""

import sys

from record.exit_codes import BAD_SETTING
from settings import SettingsError
from settings.checks import PRETRAINING
from settings.config import Config
from train import launcher
from train.children import Children, complain


def main() -> int:
    children = Children()
    try:
        config, _ = Config.load_with_warnings(without=PRETRAINING)
    except SettingsError as error:
        complain(str(error))
        return BAD_SETTING
    return launcher.launch(config, children, "finetune.evaluate")


if __name__ == "__main__":
    sys.exit(main())
