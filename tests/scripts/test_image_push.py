"""make push with stand-ins for its builders: what it refuses, what it pushes, and what it notes."""

import pytest

from tests.scripts.image_stubs import DIGEST, Clone, clone, one_sentence

__all__ = ["clone"]  # a fixture

REPOSITORY = "registry.example.org/lab/name"
OTHER = "sha256:" + 64 * "f"


@pytest.mark.parametrize("builder", ["buildx", "docker", "podman", "buildah"])
def test_it_builds_pushes_and_notes_the_digest(clone: Clone, builder: str) -> None:
    done = clone.install(builder).run("push", IMAGE=REPOSITORY)
    assert done.returncode == 0, done.stderr
    tag = f"{REPOSITORY}:{clone.git('rev-parse', 'HEAD')[:12]}"
    [call] = clone.calls(" push ")
    assert call.split()[0] == ("docker" if builder == "buildx" else builder) and call.endswith(
        f" {tag}"
    )
    assert len(clone.calls(f" --tag {tag} ")) == 1
    assert (clone.root / ".image").read_text() == f"{REPOSITORY}@{DIGEST}\n"
    assert f"push: {REPOSITORY}@{DIGEST}\n" in done.stdout and "make train-8xa100" in done.stdout
    assert clone.git("status", "--porcelain") == ""


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
def test_what_is_there_of_this_commit_is_not_built_again(clone: Clone, builder: str) -> None:
    assert clone.install(builder).run("image", IMAGE=REPOSITORY).returncode == 0
    assert clone.run("push", IMAGE=REPOSITORY).returncode == 0
    assert not clone.calls(" --file docker/Dockerfile ") and len(clone.calls(" push ")) == 1


def test_what_is_there_with_other_settings_is_built_again(clone: Clone) -> None:
    assert (
        clone.install("buildah").run("image", IMAGE=REPOSITORY, TORCH_BACKEND="cpu").returncode == 0
    )
    assert clone.run("push", IMAGE=REPOSITORY).returncode == 0
    assert len(clone.calls(" --file docker/Dockerfile ", "TORCH_BACKEND=cu126")) == 1


def test_a_later_push_replaces_the_line_of_its_repository_and_no_other(clone: Clone) -> None:
    others = [f"x.{REPOSITORY}@{OTHER}\n", f"{REPOSITORY}-2@{OTHER}\n"]
    (clone.root / ".image").write_text(others[0] + f"{REPOSITORY}@{OTHER}\n" + others[1])
    assert clone.install("podman").run("push", IMAGE=REPOSITORY).returncode == 0
    assert (clone.root / ".image").read_text() == "".join(others) + f"{REPOSITORY}@{DIGEST}\n"


def test_options_behind_two_dashes_go_to_the_push(clone: Clone) -> None:
    clone.install("buildah").run("push", "--", "--tls-verify=false", IMAGE=REPOSITORY)
    assert "--tls-verify=false" in clone.calls(" push ")[0] and not clone.calls(
        " bud ", "--tls-verify"
    )


@pytest.mark.parametrize("image", [f"{REPOSITORY}:v1", f"{REPOSITORY}@{OTHER}"])
def test_where_image_names_another_one_it_says_what_pods_take(clone: Clone, image: str) -> None:
    done = clone.install("buildah").run("push", IMAGE=image)
    assert f"IMAGE={image} is what pods take; set IMAGE={REPOSITORY}" in done.stdout
    assert (clone.root / ".image").read_text() == f"{REPOSITORY}@{DIGEST}\n"


# ---- What is refused: in one sentence, with nothing built or pushed


def refusal(clone: Clone, code: int, **environ: str) -> str:
    said = one_sentence(clone.install("buildah").run("push", **environ), code)
    assert not clone.calls(" bud ") and not clone.calls(" push ")
    assert not (clone.root / ".image").exists()
    return said


def test_without_image(clone: Clone) -> None:
    said = refusal(clone, 64)
    assert "IMAGE is not set" in said and "IMAGE=registry.example.org/lab/pure-transformer" in said


@pytest.mark.parametrize(
    "image", ["pure-transformer", "lab/pure-transformer", "lab/pure-transformer:v1.0"]
)
def test_an_image_without_a_registry(clone: Clone, image: str) -> None:
    assert f"IMAGE={image} names no registry; write its host in front" in refusal(
        clone, 64, IMAGE=image
    )


def test_a_file_that_was_changed_or_is_new(clone: Clone) -> None:
    (clone.root / "train" / "new.py").write_text("")
    said = refusal(clone, 78, IMAGE=REPOSITORY)
    assert "(train/new.py)" in said and "commit or stash" in said
    (clone.root / "train" / "model" / "loss.py").write_text("")
    assert "(train/model/loss.py and 1 more)" in refusal(clone, 78, IMAGE=REPOSITORY)


def test_a_file_that_git_ignores_and_the_image_does_not(clone: Clone) -> None:
    (clone.root / ".git" / "info" / "exclude").write_text("mine*.env\n")
    (clone.root / "presets" / "mine.env").write_text("")
    (clone.root / "mine.env").write_text("")  # ignored by both
    said = refusal(clone, 78, IMAGE=REPOSITORY)
    assert "git ignores presets/mine.env, which would enter the image" in said


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
@pytest.mark.parametrize(
    "answer",
    [
        "unauthorized: authentication required",
        "no basic auth credentials",
        "denied: requested access to the resource is denied",
    ],
)
def test_a_registry_that_wants_a_login(clone: Clone, builder: str, answer: str) -> None:
    done = clone.install(builder).run("push", IMAGE=REPOSITORY, REFUSED=answer)
    said = one_sentence(done, 78)
    assert (
        f"type `{builder} login registry.example.org`, with a token that may write to lab/name, then make "
        in said
    )
    assert answer in done.stdout and not (clone.root / ".image").exists()


@pytest.mark.parametrize("builder", ["docker", "buildah"])
def test_a_registry_that_is_out_of_reach(clone: Clone, builder: str) -> None:
    said = one_sentence(
        clone.install(builder).run("push", IMAGE=REPOSITORY, REFUSED="no route to host"), 1
    )
    assert f"{builder} could not push {REPOSITORY}:" in said and "make push tries again" in said


@pytest.mark.parametrize("builder", ["docker", "buildah"])
def test_a_push_that_tells_no_digest_notes_none(clone: Clone, builder: str) -> None:
    said = one_sentence(clone.install(builder).run("push", IMAGE=REPOSITORY, PUSHED="sha256:12"), 1)
    assert "did not tell its digest" in said and not (clone.root / ".image").exists()
