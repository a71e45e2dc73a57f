"""Addresses as settings write them: HOST, HOST:PORT or [IPV6]:PORT."""

import ipaddress
import re
from urllib.parse import urlsplit

IPV6 = r"[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*"
HOST = r"[A-Za-z0-9][A-Za-z0-9.-]*"
# 1024 to 65534: the registry of the sites listens on the port after LIGHTHOUSE's.
PORT = r"(102[4-9]|10[3-9]\d|1[1-9]\d\d|[2-9]\d{3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-4])"
PATTERN = rf"(\[{IPV6}\]|{HOST})(:{PORT})?|{IPV6}"


def split_address(address: str, default_port: int) -> tuple[str, int]:
    """Split an address. A bare IPv6 address has no port."""
    if re.fullmatch(IPV6, address):
        address = f"[{address}]"
    parts = urlsplit(f"//{address}")
    return parts.hostname or "", parts.port or default_port


def join_address(host: str, port: int) -> str:
    if ":" in host:
        host = f"[{host}]"
    return f"{host}:{port}"


def is_ip_address(host: str) -> bool:
    """Return whether a host is written as an address, and not as a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host that is written like that."""
    if is_ip_address(host):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
