"""scripts/scan_secrets.py in throwaway repositories. Every key here is made up when the tests run: none is written."""

import os
import random
import string
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import scan_secrets
from scripts.scan_secrets import find, load_rules

ROOT = Path(__file__).resolve().parent.parent.parent
RULES = ROOT / ".gitleaks.toml"
LETTERS, UPPER = string.ascii_letters + string.digits, string.ascii_uppercase + "234567"


def made_up(alphabet: str, length: int, seed: int = 0) -> str:
    return "".join(random.Random(seed).choices(alphabet, k=length))


HEX = made_up("0123456789abcdef", 40)
TOKEN = "hf_" + made_up(LETTERS, 34)


class Repository:
    """A repository with our rules, and *.log ignored."""

    def __init__(self, root: Path):
        self.root = root
        self.env = {"PATH": os.environ["PATH"], "HOME": str(root), "GIT_CONFIG_NOSYSTEM": "1"}
        for role in ("AUTHOR", "COMMITTER"):
            self.env |= {f"GIT_{role}_NAME": "a", f"GIT_{role}_EMAIL": "a@b.c"}
        self.git("init", "--quiet", "--initial-branch=main")
        self.write(".gitleaks.toml", RULES.read_text())
        self.write(".gitignore", "*.log\n")
        self.commit("rules")

    def git(self, *words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=self.root, env=self.env, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.root / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def commit(self, message: str) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        return self.git("rev-parse", "--short", "HEAD")

    def places(self, code: int = 1) -> list[str]:
        """Where a scan finds something; it never prints a key."""
        done = subprocess.run(
            [sys.executable, "-m", "scripts.scan_secrets", self.root],
            env=self.env,
            cwd=ROOT,
            text=True,
            capture_output=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert not [key for key in (HEX, TOKEN) if key[3:15] in done.stdout]
        lines = done.stdout.splitlines()[:-1]
        ends = (": hugging-face-token: 'hf_'... (37 characters)",)
        assert all(line.endswith(ends) for line in lines)
        return [line.split(": ")[0] for line in lines]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


# ---- Where a secret is found


def test_in_the_tree_and_then_in_the_history(repository: Repository) -> None:
    assert repository.places(code=0) == []
    repository.write("ignored.log", TOKEN)
    path = repository.write("b c.py", f"one = 1\ntoken = '{TOKEN}'\n")
    assert repository.places() == ["b c.py:2"]
    commit = repository.commit("it")
    assert repository.places() == ["b c.py:2", commit]
    path.unlink()
    repository.commit("gone")
    assert repository.places() == [commit]


def test_in_a_merge_a_message_a_tag_and_the_stash(repository: Repository) -> None:
    repository.git("checkout", "--quiet", "-b", "side")
    repository.commit("side")
    repository.git("checkout", "--quiet", "main")
    message = repository.commit(f"a subject\n\nwith {TOKEN}")
    repository.git("merge", "--quiet", "--no-commit", "--no-ff", "side")
    path = repository.write("merged", TOKEN)
    merge = repository.commit("merge")
    path.unlink()
    repository.commit("gone")
    repository.git("tag", "--annotate", "v1", "--message", f"tagged {TOKEN}")
    repository.write(".gitignore", f"{TOKEN}\n")
    repository.git("stash")
    places = repository.places()
    assert {message, merge, "tags"} < set(places) and len(set(places)) > 3


def test_in_binary_and_utf_16_files_and_links(repository: Repository) -> None:
    repository.write("weights.bin", b"\0\xff\xfe\0" * 9 + b" " + TOKEN.encode() + b"\0")
    repository.write("windows.env", f"HF_TOKEN={TOKEN}\r\n".encode("utf-16"))
    (repository.root / "link").symlink_to(TOKEN)
    assert repository.places() == ["link:1", "weights.bin:1", "windows.env:1"]


def test_without_a_repository_it_cannot_scan(repository: Repository) -> None:
    (repository.root / ".git").rename(repository.root / "moved")
    repository.places(code=78)


def test_ours_is_clean_in_tree_and_history() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git clone")
    assert scan_secrets.main([]) == 0


def test_a_line_that_allows_it_is_passed_over_and_no_other(repository: Repository) -> None:
    other = "hf_" + made_up(LETTERS, 34, seed=1)
    text = f"a = '{TOKEN}'  # gitleaks:allow, made up\nb = '{other}'\n"
    repository.write("fakes.py", text)
    assert repository.places() == ["fakes.py:2"]
    allowlist = f"[[allowlists]]\nregexes = ['\\A{other}']\n"
    repository.write(".gitleaks.toml", RULES.read_text() + allowlist)
    assert repository.places(code=0) == []


# ---- What a secret is


def matched(text: str) -> list[str]:
    """The rules by which a text has secrets."""
    return [rule for _, rule, _ in find(text.encode(), load_rules(RULES))]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("export WANDB_API_KEY={hex}", "wandb-key-legacy"),
        ("wandb" + "." * 60 + "{hex}", "wandb-key-legacy"),
        ("wandb" + "." * 61 + "{hex}", None),
        ("Wandb login\n{hex}", "wandb-key-legacy-below"),
        ("- name: WANDB_API_KEY\n  value: {hex}\n", "wandb-key-legacy-below"),
        ("machine api.wandb.ai\r\n  login user\r\n  password {hex}", "wandb-key-legacy-below"),
        ("wandb\n\n\n{hex}", None),
        ("wandb\n" + "." * 61 + "{hex}", None),
        ("commit {hex}", None),
        ("wandb {hex}0", None),
        ("wandb_v1_{letters40}", "wandb-key-v1"),
        ("wandb_v1_{letters36}", None),
        ("hf_{letters36}", None),
        ("hf_{letters34}", "hugging-face-token"),
        ("api_org_{letters34}", "hugging-face-token"),
        ("ghp_{letters36}", "github-token"),
        ("github_pat_{letters82}", "github-token"),
        ("glpat-{letters20}", "gitlab-token"),
        ("dckr_pat_{letters27}", "docker-hub-token"),
        ("AKIA{upper16}", "aws-access-key"),
        ("aws_secret_access_key = {letters40}", "aws-secret-key"),
        ('"SecretAccessKey": "{letters40}"', "aws-secret-key"),
        ("AIza{letters35}", "google-api-key"),
        ("sk-{letters48}", "model-api-key"),
        ("sk-proj-{letters82}", "model-api-key"),
        ("sk-ant-api03-{letters82}", "model-api-key"),
        ("nvapi-{letters64}", "nvidia-api-key"),
        ("xoxb-{letters48}", "slack-token"),
        ("https://hooks.slack.com/services/T{upper16}/B{letters34}", "webhook"),
        ("-----BEGIN RSA {private}-----\n{letters64}\n", "private-key"),
        ("-----BEGIN {private}-----\\n{letters64}\\n", "private-key"),
        ("-----BEGIN PGP {private} BLOCK-----\nVersion: GnuPG v2\n\n{letters64}\n", "private-key"),
        (
            "-----BEGIN RSA {private}-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0A\n\n{letters64}",
            "private-key",
        ),
        ("-----BEGIN PUBLIC KEY-----\n{letters64}\n", None),
        ("the line -----BEGIN {private}----- opens it", None),
    ],
)
def test_each_rule_finds_what_it_is_for(text: str, rule: str | None) -> None:
    values = {f"letters{n}": made_up(LETTERS, n) for n in (20, 27, 34, 35, 36, 40, 48, 64, 82)}
    text = text.format(hex=HEX, upper16=made_up(UPPER, 16), private="PRIVATE " + "KEY", **values)
    assert matched(text) == ([rule] if rule else [])


def test_every_rule_has_a_text_that_it_finds() -> None:
    cases = test_each_rule_finds_what_it_is_for.pytestmark[0].args[1]
    assert {rule.id for rule in load_rules(RULES)} == {rule for _, rule in cases} - {None}


@pytest.mark.parametrize(
    "text",
    [
        "wandb: " + "0" * 40,
        "wandb: " + "01" * 20,
        "hf_" + "x" * 34,
        "AKIA" + "A" * 16,
        "sk-" + "estimator-" * 5,
        "AKIA" + "QY3" * 3 + "EXAMPLE",
        "aws_secret_access_key=" + made_up(LETTERS, 30) + "EXAMPLE" + "KEY",
    ],
)
def test_what_has_no_entropy_or_is_a_known_example_is_none(text: str) -> None:
    assert matched(text) == []
