"""Which image pods run: IMAGE as it stands where it says which, else what make push pushed last.

    IMAGE                                       what pods take
    registry.example.org/lab/name               registry.example.org/lab/name@sha256:..., of the file .image
    registry.example.org/lab/name:tag           itself
    registry.example.org/lab/name@sha256:...    itself

scripts/image.py writes .image: a line REPOSITORY@sha256:... for each repository that was pushed to from this clone. git
ignores it.
"""

import re
from pathlib import Path

from k8s.cluster.kubectl import BAD_SETTING, Refused
from settings import ROOT
from settings.config import Config


def image_of(c: Config, root: Path = ROOT) -> str:
    """The image by which pods are made. Raises Refused where that is not known."""
    if not c.image:
        raise Refused(
            BAD_SETTING,
            "IMAGE is not set; name the repository of the image, like "
            "IMAGE=registry.example.org/lab/pure-transformer in .env, and put it there with `make push`",
        )
    if "@" in c.image or ":" in c.image.rpartition("/")[2]:  # a colon further left is a port's
        return c.image
    try:
        lines = (root / ".image").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    pushed = [
        line for line in lines if re.fullmatch(re.escape(c.image) + r"@sha256:[0-9a-f]{64}", line)
    ]
    if not pushed:
        raise Refused(
            BAD_SETTING,
            f"IMAGE={c.image} has no tag, and nothing was pushed to it from here (.image knows "
            "no digest of it); type `make push`, or write the tag or digest behind IMAGE",
        )
    return pushed[-1]
