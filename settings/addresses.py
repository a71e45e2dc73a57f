"""Addresses as settings write them: HOST, HOST:PORT or [IPV6]:PORT."""

IPV6 = r"[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*"
PATTERN = rf"(\[{IPV6}\]|[A-Za-z0-9][A-Za-z0-9.-]*)(:[0-9]{{1,5}})?|{IPV6}"


def split_address(address: str, default_port: int) -> tuple[str, int]:
    """Split an address. A bare IPv6 address has no port."""
    host, _, port = address.rpartition(":")
    if host.endswith("]") or (host and ":" not in host):
        return host.strip("[]"), int(port)
    return address.strip("[]"), default_port


def join_address(host: str, port: int) -> str:
    if ":" in host:
        host = f"[{host}]"
    return f"{host}:{port}"
