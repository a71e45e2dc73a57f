"""k8s/cluster/image_ref.py: which image pods run, and what is said where that is not known."""

import dataclasses
from pathlib import Path

import pytest

from k8s.cluster.image_ref import image_of
from k8s.cluster.kubectl import Refused
from settings.config import Config

REPOSITORY = "registry.example.org:5000/lab/pure-transformer"
ONE, OTHER = "sha256:" + 64 * "1", "sha256:" + 64 * "2"


def with_image(image: str) -> Config:
    return dataclasses.replace(Config(), image=image)


@pytest.mark.parametrize(
    "image", [f"{REPOSITORY}:v1", f"{REPOSITORY}@{ONE}", f"{REPOSITORY}:v1@{ONE}"]
)
def test_an_image_with_tag_or_digest_is_taken_as_it_stands(tmp_path: Path, image: str) -> None:
    (tmp_path / ".image").write_text(f"{REPOSITORY}@{OTHER}\n")
    assert image_of(with_image(image), tmp_path) == image


def test_of_a_repository_that_is_taken_which_was_pushed_last(tmp_path: Path) -> None:
    (tmp_path / ".image").write_text(
        f"x/{REPOSITORY}@{OTHER}\n{REPOSITORY}@{OTHER}\n{REPOSITORY}@{ONE}\n"
        f"{REPOSITORY}-other@{OTHER}\n"
    )
    assert image_of(with_image(REPOSITORY), tmp_path) == f"{REPOSITORY}@{ONE}"


def test_without_image_the_setting_is_named_and_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"^IMAGE is not set; .*`make push`$") as refused:
        image_of(with_image(""), tmp_path)
    assert refused.value.code == 64


@pytest.mark.parametrize(
    "noted",
    [
        None,
        "",
        f"{REPOSITORY}-other@{ONE}\n",
        f"{REPOSITORY}@sha256:12\n",
        f"registry.example.org/lab/pure-transformer@{ONE}\n",
    ],
)
def test_a_repository_that_nothing_was_pushed_to_is_refused(
    tmp_path: Path, noted: str | None
) -> None:
    if noted is not None:
        (tmp_path / ".image").write_text(noted)
    with pytest.raises(
        Refused, match=f"^IMAGE={REPOSITORY} has no tag, .* type `make push`"
    ) as refused:
        image_of(with_image(REPOSITORY), tmp_path)
    assert refused.value.code == 64
