"""What a file holds, by its name and its first bytes. Standard library only."""

LFS = b"version https://git-lfs"
PAGES = (b"<!doctype", b"<html", b"<?xml", b"<error")

FORMATS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".jsonl": "json",
    ".json": "json",
    ".jsonl.gz": "json gzip",
    ".json.gz": "json gzip",
    ".jsonl.zst": "json zstd",
    ".json.zst": "json zstd",
    ".txt": "text",
    ".py": "text",
}
EMBEDDED_ONLY = {".py"}


def format_of(name: str) -> str:
    """How a file of that name is read; "" if it is not."""
    return next((format for suffix, format in FORMATS.items() if name.lower().endswith(suffix)), "")


def foreign(start: bytes) -> str:
    """What a file is that begins so and is no data: an error page or a git-lfs pointer; "" for all else."""
    if start.startswith(LFS):
        return "a git-lfs pointer, not the file that it stands for"
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(PAGES):
        return "a web or error page"
    return ""
