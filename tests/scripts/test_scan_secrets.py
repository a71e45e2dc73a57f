"""scripts/scan_secrets.py in throwaway repositories. Every key here is made up when the tests run:
none is written."""

import random
import string
from collections.abc import Callable

import pytest

from scripts import scan_secrets
from scripts.scan_secrets import find, load_rules
from settings import ROOT
from tests.scripts.throwaway import Checkout

RULES = ROOT / ".gitleaks.toml"
LETTERS = string.ascii_letters + string.digits
Places = Callable[..., list[str]]


def make_up(alphabet, length, seed=0):
    return "".join(random.Random(seed).choices(alphabet, k=length))


HEX = make_up("0123456789abcdef", 40)
TOKEN = "hf_" + make_up(LETTERS, 34)


@pytest.fixture
def checkout(tmp_path):
    """A repository with our rules, and *.log ignored."""
    checkout = Checkout(tmp_path, ".gitleaks.toml")
    checkout.link("git")
    checkout.write(".gitignore", "*.log\n")
    checkout.commit("rules")
    return checkout


@pytest.fixture
def places(checkout, capfd):
    """Return where a scan finds the token, which it never prints."""

    def scan(code=1):
        assert scan_secrets.main([str(checkout.root)]) == code
        *lines, _ = capfd.readouterr().out.splitlines() or [""]
        for line in lines:
            assert line.endswith(": hugging-face-token: 'hf_'... (37 characters)")
        return [line.split(": ")[0] for line in lines]

    return scan


# ---- Where a secret is found


def test_in_the_tree_and_then_in_the_history(checkout, places):
    assert places(code=0) == []
    checkout.write("ignored.log", TOKEN)
    path = checkout.write("b c.py", f"one = 1\ntoken = '{TOKEN}'\n")
    assert places() == ["b c.py:2"]
    commit = checkout.commit("it")[:7]
    assert places() == ["b c.py:2", commit]
    path.unlink()
    checkout.commit("gone")
    assert places() == [commit]


def test_in_a_merge_a_message_a_tag_and_the_stash(checkout, places):
    checkout.git("checkout", "--quiet", "-b", "side")
    checkout.commit("side")
    checkout.git("checkout", "--quiet", "main")
    message = checkout.commit(f"a subject\n\nwith {TOKEN}")
    checkout.git("merge", "--quiet", "--no-commit", "--no-ff", "side")
    path = checkout.write("merged", TOKEN)
    merge = checkout.commit("merge")
    path.unlink()
    checkout.commit("gone")
    checkout.git("tag", "--annotate", "v1", "--message", f"tagged {TOKEN}")
    checkout.write(".gitignore", f"{TOKEN}\n")
    checkout.git("stash")
    assert {message[:7], merge[:7], "tags"} < {*places()}


def test_in_binary_and_utf_16_files_and_links(checkout, places):
    checkout.write("weights.bin", b"\0\xff\xfe\0" * 9 + b" " + TOKEN.encode() + b"\0")
    checkout.write("windows.env", f"HF_TOKEN={TOKEN}\r\n".encode("utf-16"))
    (checkout.root / "link").symlink_to(TOKEN)
    assert places() == ["link:1", "weights.bin:1", "windows.env:1"]


def test_without_a_repository_it_cannot_scan(checkout, places):
    (checkout.root / ".git").rename(checkout.root / "moved")
    places(code=78)


def test_ours_is_clean_in_tree_and_history():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git clone")
    assert scan_secrets.main([]) == 0


def test_a_line_that_allows_it_is_passed_over_and_no_other(checkout, places):
    other = "hf_" + make_up(LETTERS, 34, seed=1)
    text = f"a = '{TOKEN}'  # gitleaks:allow, made up\nb = '{other}'\n"
    checkout.write("fakes.py", text)
    assert places() == ["fakes.py:2"]
    allowlist = f"[[allowlists]]\nregexes = ['\\A{other}']\n"
    checkout.write(".gitleaks.toml", RULES.read_text() + allowlist)
    assert places(code=0) == []


# ---- What a secret is


def find_rules(text):
    """Return the rules by which a text has secrets."""
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
def test_each_rule_finds_what_it_is_for(text, rule):
    values = {f"letters{n}": make_up(LETTERS, n) for n in (20, 27, 34, 35, 36, 40, 48, 64, 82)}
    text = text.format(
        hex=HEX,
        upper16=make_up(string.ascii_uppercase + "234567", 16),
        private="PRIVATE " + "KEY",
        **values,
    )
    assert find_rules(text) == ([rule] if rule else [])


def test_every_rule_has_a_text_that_it_finds():
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
        "aws_secret_access_key=" + make_up(LETTERS, 30) + "EXAMPLE" + "KEY",
    ],
)
def test_what_has_no_entropy_or_is_a_known_example_is_none(text):
    assert find_rules(text) == []
