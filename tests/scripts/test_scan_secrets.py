"""scripts/scan_secrets.py in throwaway repositories. Every key here is made up when the tests run: none is written."""

import os
import random
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import scan_secrets
from scripts.scan_secrets import CannotScan, load_rules, not_shared, redacted, secrets_in

ROOT = Path(__file__).resolve().parent.parent.parent
RULES = ROOT / ".gitleaks.toml"
LETTERS, UPPER = string.ascii_letters + string.digits, string.ascii_uppercase + "234567"


def made_up(alphabet: str, length: int, seed: int = 0) -> str:
    return "".join(random.Random(seed).choices(alphabet, k=length))


HEX = made_up("0123456789abcdef", 40)
TOKEN = "hf_" + made_up(LETTERS, 34)
FOUND = f": hugging-face-token: {redacted(TOKEN.encode())}"


class Repository:
    """A repository with our rules, and *.log ignored."""

    def __init__(self, root: Path):
        self.root = root
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(root.parent),
            "GIT_CONFIG_NOSYSTEM": "1",
        }
        for role in ("AUTHOR", "COMMITTER"):
            self.env |= {f"GIT_{role}_NAME": "a", f"GIT_{role}_EMAIL": "a@b.c"}
        root.mkdir()
        self.git("init", "--quiet")
        self.git("checkout", "--quiet", "-b", "main")
        self.write(".gitleaks.toml", RULES.read_text())
        self.write(".gitignore", "*.log\n")
        self.commit("rules")

    def git(self, *arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments],
            cwd=self.root,
            env=self.env,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def commit(self, message: str) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        return self.git("rev-parse", "HEAD")[:10]

    def scan(self, code: int, root: Path | None = None, **env: str) -> list[str]:
        """What a scan that ends with this exit code prints; never a key."""
        done = subprocess.run(
            [sys.executable, scan_secrets.__file__, root or self.root],
            env=self.env | env,
            text=True,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.root.parent,
        )
        assert done.returncode == code, done.stdout
        assert "Traceback" not in done.stdout
        assert not [key for key in (HEX, TOKEN) if key[3:15] in done.stdout]
        return done.stdout.splitlines()

    def places(self) -> list[str]:
        """The findings of a scan that has some, without their common end."""
        return [
            line.removesuffix(FOUND)
            for line in self.scan(code=1)
            if not line.startswith("secrets: ")
        ]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "with blank")


def matched(text: str | bytes) -> list[str]:
    """The rules by which a text has secrets."""
    data = text if isinstance(text, bytes) else text.encode()
    return [rule for _, rule, _ in secrets_in(data, load_rules(RULES))]


# ---- Where a secret is found


def test_a_clean_repository_is_said_to_be_so(repository: Repository) -> None:
    assert repository.scan(code=0) == [
        "secrets: none in 2 files and 3 objects of the history (0 binary)"
    ]


def test_ours_is_clean_in_tree_and_history() -> None:
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("not a git clone")
    done = subprocess.run(
        [sys.executable, scan_secrets.__file__], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "secrets: none in " in done.stdout


def test_in_the_tree(repository: Repository) -> None:
    repository.write("a/b c.py", f"one = 1\ntoken = '{TOKEN}'\n")
    assert repository.places() == ["a/b c.py:2"]  # not tracked yet
    repository.git("add", "--all")
    assert repository.places() == ["a/b c.py:2", "(index):a/b c.py:2"]
    commit = repository.commit("it")
    assert repository.places() == ["a/b c.py:2", f"{commit}:a/b c.py:2"]


def test_an_ignored_file_is_not_read_unless_it_is_tracked(repository: Repository) -> None:
    repository.write("console.log", TOKEN)
    repository.scan(code=0)
    repository.git("add", "--force", "console.log")
    assert repository.places() == ["console.log:1", "(index):console.log:1"]


def test_a_secret_that_was_deleted_since_is_in_the_history(repository: Repository) -> None:
    path = repository.write("notes.md", f"\n\n{TOKEN}\n")
    commit = repository.commit("oops")
    path.write_text(f"{TOKEN}, again\n")
    repository.commit("another version")
    path.unlink()
    repository.commit("gone")
    assert repository.places() == [f"{commit}:notes.md:3{FOUND}, in 2 versions"]


def test_a_secret_that_a_merge_brought_in(repository: Repository) -> None:
    repository.git("checkout", "--quiet", "-b", "side")
    repository.commit("side")
    repository.git("checkout", "--quiet", "main")
    repository.commit("main")
    repository.git("merge", "--quiet", "--no-commit", "--no-ff", "side")
    path = repository.write("merged", TOKEN)
    commit = repository.commit("merge")
    path.unlink()
    repository.commit("gone")
    assert repository.places() == [f"{commit}:merged:1"]


def test_in_a_commit_message_and_in_a_tag(repository: Repository) -> None:
    commit = repository.commit(f"a subject\n\nwith {TOKEN}")
    repository.git("tag", "--annotate", "v1", "--message", f"tagged {TOKEN}")
    tag = repository.git("rev-parse", "v1")[:10]
    assert sorted(repository.places()) == sorted(
        [f"{commit}:(commit message):3", f"{tag}:(tag message):1"]
    )


def test_on_a_branch_that_is_not_checked_out_and_in_the_stash(repository: Repository) -> None:
    repository.git("checkout", "--quiet", "-b", "side")
    repository.write("side.py", TOKEN)
    commit = repository.commit("side")
    repository.git("checkout", "--quiet", "main")
    repository.write(".gitignore", TOKEN[::-1] + f"\n{TOKEN}\n")
    repository.git("stash")
    places = repository.places()
    assert len(places) == 1 and places[0].startswith(
        (f"{commit}:side.py:1", repository.git("rev-parse", "stash")[:10])
    )
    assert places[0].endswith("in 2 versions")


def test_a_name_that_a_terminal_would_obey_is_printed_harmlessly(repository: Repository) -> None:
    repository.write("a\x1b[2Jb\nc", TOKEN)
    assert repository.places() == ["a?[2Jb?c:1"]


def test_a_link_is_read_as_git_reads_it(repository: Repository) -> None:
    (repository.root / "outside").symlink_to("/etc/hostname-that-is-not")
    (repository.root / "link").symlink_to(TOKEN)
    assert repository.places() == ["link:1"]


# ---- What is not searched is said


def test_binary_and_utf_16_files_are_searched_and_counted(repository: Repository) -> None:
    repository.write("weights.bin", b"\0\xff\xfe\0" * 9 + b" " + TOKEN.encode() + b"\0")
    repository.write("windows.env", f"HF_TOKEN={TOKEN}\r\n".encode("utf-16"))
    lines = repository.scan(code=1)
    assert [line.removesuffix(FOUND) for line in lines[:2]] == ["weights.bin:1", "windows.env:1"]
    assert "4 files and 3 objects of the history (2 binary)" in lines[-1]


def test_a_file_over_the_limit_is_named(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.write("data.jsonl", b"x" * 20_000)
    repository.commit("data")
    monkeypatch.setattr(scan_secrets, "LARGEST", 10_000)
    monkeypatch.setattr(scan_secrets, "ENVIRONMENT", repository.env)
    assert scan_secrets.scan(repository.root) == 0
    assert (
        capsys.readouterr().out.count("secrets: not scanned: data.jsonl (0 MiB, the limit is 0)")
        == 2
    )


def test_a_repository_within_is_named(repository: Repository) -> None:
    Repository(repository.root / "within")
    assert "secrets: not scanned: within/ (a repository of its own)" in repository.scan(code=0)


def test_a_file_that_is_deleted_but_not_committed_is_no_trouble(repository: Repository) -> None:
    (repository.root / ".gitignore").unlink()
    assert "none in 1 files" in repository.scan(code=0)[0]


def test_a_shallow_clone_says_that_history_is_missing(repository: Repository) -> None:
    path = repository.write("notes.md", TOKEN)
    repository.commit("oops")
    path.unlink()
    repository.commit("gone")
    shallow = repository.root.parent / "shallow"
    repository.git("clone", "--quiet", "--depth=1", repository.root.as_uri(), str(shallow))
    assert (
        "secrets: a shallow clone: only the history that is here was scanned"
        in repository.scan(0, shallow)[0]
    )


def test_without_a_repository_or_without_git_it_cannot_scan(
    repository: Repository, tmp_path: Path
) -> None:
    shutil.copytree(repository.root, tmp_path / "copy", ignore=shutil.ignore_patterns(".git"))
    assert "is no git repository: nothing was scanned" in repository.scan(78, tmp_path / "copy")[0]
    assert "no git here" in repository.scan(78, PATH=str(tmp_path))[0]


def test_a_repository_without_a_commit_is_scanned(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "new")
    shutil.rmtree(repository.root / ".git")
    repository.git("init", "--quiet")
    repository.write("a", TOKEN)
    assert repository.places() == ["a:1"]


# ---- What a secret is


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


def test_a_public_key_file_is_not_confused_with_the_private_one(tmp_path: Path) -> None:
    if not shutil.which("ssh-keygen"):
        pytest.skip("no ssh-keygen")
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "id"], check=True
    )
    assert matched((tmp_path / "id").read_bytes()) == ["private-key"]
    assert matched((tmp_path / "id.pub").read_bytes()) == []


def test_a_line_that_allows_it_is_passed_over_and_no_other(repository: Repository) -> None:
    repository.write("fakes.py", f"a = '{TOKEN}'  # gitleaks:allow, made up\nb = '{TOKEN}'\n")
    assert repository.places() == ["fakes.py:2"]
    key = "-----BEGIN PRIVATE " + f"KEY-----\n{made_up(LETTERS, 64)}"
    assert matched(key) and not matched(key + " gitleaks:allow")


def test_an_allowlist_takes_out_one_value_everywhere(repository: Repository) -> None:
    other = "hf_" + made_up(LETTERS, 34, seed=1)
    repository.write("fakes.py", f"{TOKEN}\n{other}\n")
    commit = repository.commit("fakes")
    repository.write(
        ".gitleaks.toml", RULES.read_text() + f"[[allowlists]]\nregexes = ['''\\A{TOKEN}''']\n"
    )
    places = [line.split(": ")[0] for line in repository.places()]
    assert places == ["fakes.py:2", f"{commit}:fakes.py:2"]


@pytest.mark.parametrize("value", [HEX, TOKEN])
def test_redaction_keeps_three_characters(value: str) -> None:
    assert redacted(value.encode()) == f"{value[:3]}*** ({len(value)} characters)"
    assert redacted(b"\x1b[2J" + value.encode()).startswith("?[2***")


# ---- The rules are one file for two readers


def test_the_two_forms_of_a_w_and_b_key_are_as_they_were_agreed() -> None:
    rules = {rule.id: rule for rule in load_rules(RULES)}
    old, new = rules["wandb-key-legacy"], rules["wandb-key-v1"]
    assert (old.regex.pattern, old.group, old.entropy) == (
        rb"(?i)wandb[^\n]{0,60}?\b([0-9a-f]{40})\b",
        1,
        3.0,
    )
    assert new.regex.pattern == rb"\bwandb_v1_[A-Za-z0-9_-]{40,}"


@pytest.mark.parametrize(
    "regex",
    [
        "(?i)a",
        "(?is)a",
        "a(?i:b)c",
        "(?P<name>a)",
        r"\ba{2,1000}?\b",
        r"[^\]$(?=]+",
        r"\$\(\?=",
        r"[]$a]",
        r"\\\.\x41",
        r"[+*?]a",
    ],
)
def test_what_go_and_python_read_alike_is_allowed(regex: str) -> None:
    assert not_shared(regex) is None


@pytest.mark.parametrize(
    "regex",
    [
        "a(?i)b",
        "(?=a)b",
        "(?<!a)b",
        "(?<name>a)",
        "(?P=name)",
        r"(a)\1",
        "a$",
        r"a\z",
        r"a\Z",
        "a++",
        "(?>a)",
        "(?x)a",
        "(?U)a",
        "(?a)a",
        r"\pL",
        r"\Qa\E",
        "[[:alpha:]]",
        "a{1001}",
        "a{2,1001}",
        "a{,5}",
        "\u00e9",
        r"\\(?=a)",
        "(?i-s:a)",
    ],
)
def test_what_they_do_not_is_refused(regex: str) -> None:
    assert not_shared(regex) is not None


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[[rules]\n", "Expected"),
        ("", "no rules"),
        ("rules = 3", "rules must be written [[rules]]"),
        ("[[rules]]\nid = 'x'\nregex = '(a'", "rule x: missing )"),
        ("[[rules]]\nregex = 'a'", "rule 1: no id"),
        ("[[rules]]\nid = 'x'", "rule x: no regex"),
        ("[[rules]]\nid = 'x'\nregex = 'a$'", "rule x: Go and Python"),
        ("[[rules]]\nid = 'x'\nregex = 'a*'", "rule x: matches the empty text"),
        ("[[rules]]\nid = 'x'\nregex = '[a&&b]'", "rule x: Possible set intersection"),
        (
            "[[rules]]\nid = 'x'\nregex = '(a)b'",
            "rule x: secretGroup is 0, and the expression has 1 groups",
        ),
        ("[[rules]]\nid = 'x'\nregex = '(a)b'\nsecretGroup = 2", "rule x: secretGroup is 2"),
        (
            "[[rules]]\nid = 'x'\nregex = 'a'\nentropy = 'high'",
            "rule x: entropy = 'high' is of the wrong kind",
        ),
        (
            "[[rules]]\nid = 'x'\nregex = 'a'\nkeywords = ['A']",
            "rule x: keywords must be lower case, A is not",
        ),
        (
            "[[rules]]\nid = 'x'\nregex = 'a'\nkeywords = 'a'",
            "rule x: keywords = 'a' is of the wrong kind",
        ),
        (
            "[[rules]]\nid = 'x'\nregex = 'a'\npath = 'b'",
            "rule x: path is not read by scan_secrets.py",
        ),
        (
            "[[rules]]\nid = 'x'\nregex = 'a'\n[[rules.allowlists]]\nregexes = ['(']",
            "rule x, allowlists: missing )",
        ),
        (
            "[[rules]]\nid = 'x'\nregex = 'a'\n[[allowlists]]\ndescription = 'b'",
            ".gitleaks.toml, allowlists: no regexes",
        ),
        ("[[rules]]\nid = 'x'\nregex = 'a'\n" * 2, "rule x: twice"),
        ("[allowlist]\npaths = ['a']", "allowlist: not read"),
        ("[extend]\npath = 'other.toml'", "only useDefault = true"),
        (b"\xff", "codec can't decode"),
    ],
)
def test_bad_rules_are_told_with_file_and_rule(
    tmp_path: Path, toml: str | bytes, said: str
) -> None:
    path = tmp_path / ".gitleaks.toml"
    path.write_bytes(toml if isinstance(toml, bytes) else toml.encode())
    with pytest.raises(CannotScan) as raised:
        load_rules(path)
    assert str(raised.value).startswith(".gitleaks.toml") and said in str(raised.value)


def test_missing_rules_end_the_scan(repository: Repository) -> None:
    (repository.root / ".gitleaks.toml").unlink()
    assert "secrets: .gitleaks.toml: [Errno 2] No such file" in repository.scan(code=78)[0]
