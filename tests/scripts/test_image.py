"""make image with stand-ins for its builders: which is taken, what it is told, and what is said where none can be."""

import re
import shutil
from datetime import datetime
from pathlib import Path

import pytest

from settings.declare import ROOT
from tests.scripts.image_stubs import Clone, clone, one_sentence

__all__ = ["clone"]  # a fixture

BUILDS = {
    "buildx": "docker buildx build --load ",
    "docker": "docker build ",
    "podman": "podman build ",
    "buildah": "buildah bud ",
}
SETTINGS = {"IMAGE": "registry.example.org:5000/lab/name"}


def build_arguments(call: str) -> dict[str, str]:
    found = re.findall(r"--build-arg (\w+)=(.*?)(?= --)", call)
    assert len(dict(found)) == len(found)
    return dict(found)


# ---- Which builder


@pytest.mark.parametrize("builder", BUILDS)
def test_each_builder_is_told_the_same(clone: Clone, builder: str) -> None:
    done = clone.install(builder).run("image", IMAGE_BUILDER=builder, **SETTINGS)
    assert done.returncode == 0, done.stderr
    commit = clone.git("rev-parse", "HEAD")
    tag = f"registry.example.org:5000/lab/name:{commit[:12]}"
    [call] = clone.calls(f" {BUILDS[builder]}")
    assert f" --file docker/Dockerfile --tag {tag} " in call and call.endswith(" .")
    told = build_arguments(call)
    assert (told["REVISION"], told["VERSION"], told["TORCH_BACKEND"]) == (
        commit,
        commit[:12],
        "cu126",
    )
    seconds = int(clone.git("log", "-1", "--format=%ct"))
    assert int(told["SOURCE_DATE_EPOCH"]) == seconds
    assert (
        told["CREATED"].endswith("Z")
        and datetime.fromisoformat(told["CREATED"]).timestamp() == seconds
    )
    assert (
        "BASE_IMAGE" not in told and "FLASH_ATTN_WHEEL" not in told
    )  # the Dockerfile's own defaults
    assert (f"--timestamp {seconds}" in call) == (builder in ("podman", "buildah"))
    assert (
        f"{tag}, 1.2GB, built in " in done.stdout
        and done.stdout.splitlines()[-1] == "image: next: make push"
    )


@pytest.mark.parametrize(
    ("there", "broken", "taken"),
    [
        (["buildx", "podman", "buildah"], "", "buildx"),
        (["docker", "podman", "buildah"], "", "docker"),
        (["podman", "buildah"], "", "podman"),
        (["buildah"], "", "buildah"),
        (["docker", "buildah"], "docker", "buildah"),
        (["buildx", "podman", "buildah"], "docker podman", "buildah"),
    ],
)
def test_the_first_that_works_is_taken(
    clone: Clone, there: list[str], broken: str, taken: str
) -> None:
    done = clone.install(*there).run("image", BROKEN=broken)
    assert done.returncode == 0, done.stderr
    assert f" with {taken}: " in done.stdout
    assert len(clone.calls(f" {BUILDS[taken]}")) == 1


def test_options_behind_two_dashes_go_to_the_builder(clone: Clone) -> None:
    assert clone.install("buildah").run("image", "--", "--network", "host").returncode == 0
    assert clone.calls("buildah bud ")[0].endswith(" --network host .")


@pytest.mark.parametrize("builder", BUILDS)
def test_it_is_for_the_processors_of_the_cluster_whatever_this_machine_has(
    clone: Clone, builder: str
) -> None:
    clone.install(builder)
    for options, platform in (
        ((), "linux/amd64"),
        (("--platform", "linux/arm64"), "linux/arm64"),
        (("--quiet", "--platform=linux/arm64"), "linux/arm64"),
    ):
        assert clone.run("image", "--", *options, IMAGE_BUILDER=builder).returncode == 0
        assert re.findall(r" --platform[ =](\S+)", clone.calls(f" {BUILDS[builder]}")[0]) == [
            platform
        ]


def test_nothing_to_build_with_is_one_sentence(clone: Clone) -> None:
    said = one_sentence(clone.run("image"), 78)
    assert (
        "nothing to build an image with; install docker, podman or buildah" in said
        and "apt-get" in said
    )


def test_a_builder_that_was_chosen_and_is_not_there_is_one_sentence(clone: Clone) -> None:
    said = one_sentence(clone.install("podman").run("image", IMAGE_BUILDER="buildah"), 78)
    assert "IMAGE_BUILDER=buildah is not installed" in said and "IMAGE_BUILDER=auto" in said


def test_a_builder_whose_daemon_is_off_is_one_sentence(clone: Clone) -> None:
    for chosen in ("auto", "docker"):
        said = one_sentence(
            clone.install("docker").run("image", BROKEN="docker", IMAGE_BUILDER=chosen), 78
        )
        assert "docker is installed but does not work (`docker info` says why)" in said
        assert "podman" in said


def test_a_builder_that_is_none_is_a_bad_setting(clone: Clone) -> None:
    done = clone.run("image", IMAGE_BUILDER="kaniko")
    assert done.returncode == 64
    assert (
        "IMAGE_BUILDER=kaniko (environment): must be one of auto, buildx, docker, podman, buildah"
        in done.stderr
    )


# ---- What is built


def test_the_torch_build_is_said_before_anything_is_downloaded(clone: Clone) -> None:
    done = clone.install("podman").run("image")
    assert re.match(
        r"image: building localhost/pure-transformer:[0-9a-f]{12} with podman: torch 2\.13\.0 in its build "
        r"cu126, which runs with NVIDIA drivers from 525 on .*about 3 GB to download",
        done.stdout,
    )
    done = clone.run("image", TORCH_BACKEND="cpu")
    assert "build cpu (" in done.stdout and "0.4 GB" in done.stdout


def test_settings_of_the_image_reach_the_builder(clone: Clone) -> None:
    wheel = f"https://example.org/flash_attn-2.8.3-cp311-cp311-linux_x86_64.whl#sha256={64 * 'a'}"
    clone.install("podman").run(
        "image", BASE_IMAGE="localhost/base:x", FLASH_ATTN_WHEEL=wheel, TORCH_BACKEND="cu130"
    )
    told = build_arguments(clone.calls("podman build ")[0])
    assert (told["BASE_IMAGE"], told["FLASH_ATTN_WHEEL"], told["TORCH_BACKEND"]) == (
        "localhost/base:x",
        wheel,
        "cu130",
    )
    assert told["BUILT_WITH"] == f"torch=cu130 base=localhost/base:x flash-attn={wheel}"


@pytest.mark.parametrize(
    ("image", "repository"),
    [
        ("", "localhost/pure-transformer"),
        ("registry.example.org/a/b", "registry.example.org/a/b"),
        ("registry.example.org:5000/a", "registry.example.org:5000/a"),
        ("registry.example.org:5000/a:v1@sha256:" + 64 * "0", "registry.example.org:5000/a"),
        ("a/b:latest", "a/b"),
    ],
)
def test_the_tag_is_the_commit_in_the_repository_of_image(
    clone: Clone, image: str, repository: str
) -> None:
    clone.install("buildah").run("image", IMAGE=image)
    assert (
        len(clone.calls("bud ", f" --tag {repository}:{clone.git('rev-parse', 'HEAD')[:12]} ")) == 1
    )


@pytest.mark.parametrize("how", ["changed", "new", "ignored"])
def test_a_tree_that_differs_from_its_commit_is_marked_as_such(clone: Clone, how: str) -> None:
    if how == "ignored":  # by git, but it would enter the image
        (clone.root / ".git" / "info" / "exclude").write_text("mine.py\n")
    path = clone.root / "train" / ("model/loss.py" if how == "changed" else "mine.py")
    path.write_text("x = 1\n")
    done = clone.install("buildah").run("image")
    commit = clone.git("rev-parse", "HEAD")
    told = build_arguments(clone.calls("bud ")[0])
    assert (told["VERSION"], told["REVISION"]) == (commit[:12] + "-dirty", commit + "-dirty")
    assert "make push will refuse it" in done.stdout


def test_what_git_ignores_and_the_image_too_changes_nothing(clone: Clone) -> None:
    for name in (".env", "runs/tiny/a.py", "train/__pycache__/a.pyc", "train/.env"):
        (clone.root / name).parent.mkdir(parents=True, exist_ok=True)
        (clone.root / name).write_text("")
    assert "-dirty" not in clone.install("buildah").run("image").stdout


@pytest.mark.parametrize(
    ("remote", "source"),
    [
        ("https://me:token@git.example.org/lab/name.git", "https://git.example.org/lab/name"),
        ("git@git.example.org:lab/name.git", "https://git.example.org/lab/name"),
        ("ssh://git@git.example.org:2222/lab/name", "https://git.example.org/lab/name"),
        ("/srv/name", None),
    ],
)
def test_the_source_is_labelled_without_passwords(
    clone: Clone, remote: str, source: str | None
) -> None:
    clone.git("remote", "add", "origin", remote)
    clone.install("buildah").run("image")
    [call] = clone.calls("bud ")
    assert re.findall(r"org\.opencontainers\.image\.source=(\S+)", call) == (
        [source] if source else []
    )
    assert "token" not in call


def test_a_failed_build_says_so_and_where_to_look(clone: Clone) -> None:
    done = clone.install("buildah").run("image", FAILS="1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "no space left on device"
    assert "buildah could not build the image" in done.stderr and "docs/image.md" in done.stderr
    heading = re.search(r'docs/image\.md, "(.*)"', done.stderr)
    assert heading and f"## {heading[1]}\n" in (ROOT / "docs" / "image.md").read_text()


# ---- Without git


def test_a_machine_without_git_is_one_sentence(clone: Clone) -> None:
    (clone.bin / "git").unlink()
    assert "git is not installed" in one_sentence(clone.install("buildah").run("image"), 78)


def test_a_copy_that_is_no_clone_is_one_sentence(clone: Clone, tmp_path: Path) -> None:
    clone.env["GIT_CEILING_DIRECTORIES"] = str(tmp_path)
    shutil.rmtree(clone.root / ".git")
    said = one_sentence(clone.install("buildah").run("image"), 78)
    assert "not a git repository" in said and "git clone" in said


def test_a_copy_inside_another_repository_is_not_taken_for_it(clone: Clone, tmp_path: Path) -> None:
    shutil.rmtree(clone.root / ".git")
    clone.root = clone.root.rename(tmp_path / "copy")
    outer = Clone.__new__(Clone)
    outer.root, outer.env = tmp_path, clone.env
    outer.git("init", "-q")
    outer.commit()
    assert f"another repository, {tmp_path}" in one_sentence(
        clone.install("buildah").run("image"), 78
    )
