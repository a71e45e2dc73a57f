"""Build the image that pods run, with docker, podman or buildah, and push it to a registry.

    python -m scripts.image build [-- OPTION...]    options for the builder, such as --no-cache
    python -m scripts.image push [-- OPTION...]     options for the push, such as --tls-verify=false
    python -m scripts.image facts                   TAG, REVISION, VERSION, a line each

The tag is the commit, with -dirty if files differ from it. A push builds what is missing and notes
the digest in .image, which the manifests read (k8s/cluster/image_ref.py).
It reads IMAGE (a setting) and the variables of the build (settings/targets.py VARIABLES).
Exit codes: 0, 64 a bad setting, 78 no builder, git or login, or changes to commit, 1 a failure.
"""

import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record.exit_codes import BAD_DATA, BAD_SETTING
from record.provenance import explain_missing_commit, run_git
from settings import ROOT, SettingsError, explain_error, load_config
from settings.checks import PRETRAINING

BUILDERS = ("buildx", "docker", "podman", "buildah")
RULES = {
    "TORCH_BACKEND": ("[a-z0-9.]+", "a build of PyTorch, for example cpu or cu126"),
    "IMAGE_BUILDER": (f"auto|{'|'.join(BUILDERS)}", f"one of auto, {', '.join(BUILDERS)}"),
    "BASE_IMAGE": (r"\S+", "an image, for example python:3.11-slim-bookworm"),
    "FLASH_ATTN_WHEEL": (
        r"(https?|file)://[^#]+\.whl#sha256=[0-9a-f]{64}",
        "the address of a .whl with #sha256= and 64 hexadecimal digits",
    ),
}


class Refused(Exception):
    """The image cannot be built or pushed; the message says what to do."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


def read_variable(name: str, default: str = "") -> str:
    """Read a variable of the build."""
    value = os.environ.get(name) or default
    pattern, rule = RULES[name]
    if value and not re.fullmatch(pattern, value):
        raise Refused(BAD_SETTING, f"{name}={value}: must be {rule}")
    return value


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a program quietly."""
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


def git(*words: str) -> str:
    return run_git(*words).stdout.rstrip("\n")


class Source:
    """The commit that an image is built from, and the files that differ from it.

    Attributes:
        changed: lines of `git status`.
        unknown: files that git does not track and that would enter the image, ignored ones too.
    """

    def __init__(self) -> None:
        if shutil.which("git") is None or run_git("rev-parse", "--verify", "HEAD").returncode:
            raise Refused(BAD_DATA, f"An image names its commit. {explain_missing_commit()}.")
        self.commit = git("rev-parse", "HEAD")
        self.committed = int(git("log", "-1", "--format=%ct"))
        self.changed = git("status", "--porcelain", "--untracked-files=normal").splitlines()
        ignore = (ROOT / ".dockerignore").read_text().splitlines()
        enter = [f":(glob){line[1:]}" for line in ignore if line.startswith("!")]
        hidden = ":(exclude,glob)**/.*"
        self.unknown = git("ls-files", "--others", "--", *enter, hidden).splitlines()
        self.suffix = "-dirty" if self.changed or self.unknown else ""
        self.version = self.commit[:12] + self.suffix


class Image:
    """The image of a commit, and the builder that makes it."""

    def __init__(self) -> None:
        config = load_config(without=PRETRAINING)
        self.name = config.image
        self.backend = read_variable("TORCH_BACKEND", "auto")
        self.drivers = ""
        if self.backend == "auto":  # an image cannot ask a driver
            self.backend = "cu126"
            self.drivers = ", which runs with NVIDIA drivers from 525 on"
        self.base = read_variable("BASE_IMAGE")
        self.wheel = read_variable("FLASH_ATTN_WHEEL")
        base = self.base or "default"
        wheel = self.wheel or "none"
        self.built_with = f"torch={self.backend} base={base} flash-attn={wheel}"
        repository = self.name.partition("@")[0]
        folder, slash, last = repository.rpartition("/")
        # A colon further left belongs to a port.
        self.repository = folder + slash + last.partition(":")[0] or "localhost/pure-transformer"
        self.builder = read_variable("IMAGE_BUILDER", "auto")
        self.tool = ""
        self.source = Source()
        self.tag = f"{self.repository}:{self.source.version}"

    def find_builder(self) -> None:
        """Take the first builder that works. docker and podman may be clients of a machine that is off."""
        wanted = BUILDERS if self.builder == "auto" else (self.builder,)
        for builder in wanted:
            tool = "docker" if builder == "buildx" else builder
            question = {"buildx": ["buildx", "version"], "buildah": ["version"]}
            is_there = shutil.which(tool) is not None
            if is_there and run(tool, *question.get(builder, ["info"])).returncode == 0:
                self.builder = builder
                self.tool = tool
                return
        raise Refused(
            BAD_DATA,
            f"None of these works: {', '.join(wanted)}. Start the daemon of one (`docker info` says "
            "what is wrong), or install docker, podman or buildah (apt-get install buildah).",
        )

    def label(self, name: str) -> str:
        """Read a label of the image; empty if it is not here."""
        kind = ["image", "inspect"]
        where = ".Config.Labels"
        if self.tool == "buildah":
            kind = ["inspect", "--type", "image"]
            where = ".OCIv1.Config.Labels"
        format = f'{{{{index {where} "{name}"}}}}'
        return run(self.tool, *kind, "--format", format, self.tag).stdout.strip()

    def is_built(self) -> bool:
        """Whether the image of this commit and these settings is here."""
        return (
            not self.source.suffix
            and self.label("org.opencontainers.image.revision") == self.source.commit
            and self.label("pure-transformer.built-with") == self.built_with
        )

    def command(self, options: list[str]) -> list[str]:
        """Build the command that builds."""
        source = self.source
        oci = ["--format", "oci", "--timestamp", str(source.committed)]
        oci += ["--ignorefile", ".dockerignore"]
        commands = {
            "buildx": ["docker", "buildx", "build", "--load"],
            "docker": ["docker", "build"],
            "podman": ["podman", "build", *oci],
            "buildah": ["buildah", "bud", "--layers", *oci],
        }
        created = datetime.datetime.fromtimestamp(source.committed, datetime.UTC)
        arguments = {
            "REVISION": source.commit + source.suffix,
            "VERSION": source.version,
            "CREATED": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "SOURCE_DATE_EPOCH": str(source.committed),
            "TORCH_BACKEND": self.backend,
            "BUILT_WITH": self.built_with,
            "BASE_IMAGE": self.base,
            "FLASH_ATTN_WHEEL": self.wheel,
        }
        command = commands[self.builder]
        for name, value in arguments.items():
            if value:
                command += ["--build-arg", f"{name}={value}"]
        # Pods run on x86 processors, also if this machine has an Arm one.
        if not any(option.startswith("--platform") for option in options):
            command += ["--platform", "linux/amd64"]
        return [*command, "--file", "docker/Dockerfile", "--tag", self.tag, *options, "."]

    def build(self, options: list[str]) -> None:
        began = time.monotonic()
        torch = (ROOT / "requirements/torch.txt").read_text().strip().replace("==", " ")
        size = "0.4 GB" if self.backend == "cpu" else "3 GB"
        print(
            f"image: building {self.tag} with {self.builder}: {torch} in its build {self.backend}"
            f"{self.drivers} (TORCH_BACKEND, docs/image.md), about {size} to download if nothing "
            "is cached",
            flush=True,
        )
        # Attestations would make the digest depend on the time of the build.
        environment = os.environ | {"BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
        command = self.command(options)
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            raise Refused(
                1,
                f"{self.builder} could not build the image, see above. If a download failed, see "
                'docs/image.md, "Networks with a proxy or an index of their own".',
            )
        size = run(self.tool, "images", "--format", "{{.Size}}", self.tag).stdout.split("\n")[0]
        print(f"image: {self.tag}, {size}, built in {time.monotonic() - began:.0f} s")

    def check_push(self) -> None:
        """Refuse to push to no registry, or what is no commit."""
        example = "for example IMAGE=registry.example.org/lab/pure-transformer"
        registry, slash, _ = self.name.partition("/")
        if not self.name:
            raise Refused(
                BAD_SETTING, f"IMAGE is not set. Name the repository to push to, {example}."
            )
        # As builders do: a dot or a port tells a registry from a folder of the default one.
        if not slash or not (re.search("[.:]", registry) or registry == "localhost"):
            raise Refused(BAD_SETTING, f"IMAGE={self.name} names no registry, {example}.")
        if self.source.changed:
            raise Refused(
                BAD_DATA,
                f"Files differ from the commit ({self.source.changed[0][3:]}), and an image that is "
                "pushed must be some commit. Commit or stash them, then run `make push`.",
            )
        if self.source.unknown:
            raise Refused(
                BAD_DATA,
                f"git ignores {self.source.unknown[0]}, which would enter the image. "
                "Commit or remove it, then run `make push`.",
            )

    def push(self, options: list[str]) -> str:
        """Push the image. Returns its digest."""
        with tempfile.TemporaryDirectory() as folder:
            digest_file = Path(folder, "digest")
            command = [self.tool, "push", *options]
            if self.tool != "docker":
                command += ["--digestfile", str(digest_file)]
            if subprocess.run([*command, self.tag], cwd=ROOT, check=False).returncode:
                registry, _, path = self.repository.partition("/")
                raise Refused(
                    1,
                    f"{self.tool} could not push {self.tag}, see above. If {registry} requires a "
                    f"login, run `{self.tool} login {registry}` with a token that may write to "
                    f"{path}. Then run `make push` again.",
                )
            if self.tool == "docker":
                format = '{{join .RepoDigests "\\n"}}'
                inspect = run("docker", "image", "inspect", "--format", format, self.tag)
                text = inspect.stdout.rpartition(f"{self.repository}@")[2]
            else:
                text = digest_file.read_text()
        digest = re.match("sha256:[0-9a-f]{64}\\b", text)
        if digest is None:
            raise Refused(1, f"{self.tool} pushed {self.tag}, but gave no digest: push it again.")
        return digest[0]

    def note(self, digest: str) -> None:
        """Write the digest of this repository to .image, in place of an earlier one."""
        file = ROOT / ".image"
        lines = file.read_text().splitlines() if file.exists() else []
        lines = [line for line in lines if not line.startswith(f"{self.repository}@")]
        file.write_text("\n".join([*lines, f"{self.repository}@{digest}", ""]))


def build(image: Image, options: list[str]) -> None:
    image.find_builder()
    image.build(options)
    if image.source.suffix:
        print("image: files differ from the commit, so make push will refuse it (git status)")
    else:
        print("image: next: make push")


def push(image: Image, options: list[str]) -> None:
    image.check_push()
    image.find_builder()
    if image.is_built():
        print(f"push: {image.tag} is here already", flush=True)
    else:
        image.build([])
    digest = image.push(options)
    image.note(digest)
    print(f"push: {image.repository}@{digest}")
    if image.name == image.repository:
        print("push: noted in .image for the manifests; next: make train-8xa100 (DRY_RUN=1)")
    else:
        print(
            f"push: noted in .image, but pods take IMAGE={image.name}. To take this one, set "
            f"IMAGE={image.repository}"
        )


def main(words: list[str]) -> int:
    match words:
        case ["build" | "push" as action]:
            options: list[str] = []
        case ["build" | "push" as action, "--", *options]:
            pass
        case ["facts" as action]:
            options = []
        case _:
            print(__doc__, file=sys.stderr)
            return BAD_SETTING
    try:
        image = Image()
        if action == "facts":
            print(image.tag, image.source.commit + image.source.suffix, image.source.version)
        elif action == "push":
            push(image, options)
        else:
            build(image, options)
    except (Refused, SettingsError) as error:
        code = error.code if isinstance(error, Refused) else BAD_SETTING
        name = "push" if action == "push" else "image"
        print(f"{name}: {explain_error(error)}", file=sys.stderr)
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
