"""Meaning for others of the address that a scheduler listens on."""

from __future__ import annotations

import ipaddress

ANY = ("0.0.0.0", "::", "")  # noqa: S104  # recognised, not bound


def is_loopback(host: str) -> bool:
    """Tell whether nobody outside this machine can connect; a name that is not localhost may lead anywhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def reachable(host: str) -> str:
    """An address at which this machine's own processes reach what listens on ``host``."""
    return "127.0.0.1" if host in ANY else host


def open_host_warning(host: str) -> str:
    where = "every network that this machine is on" if host in ANY else f"whatever network {host} is on"
    return (
        f"WARNING: the scheduler can be called from {where}, and what is said is not encrypted: who can listen there "
        "learns the token, and with it runs code as you. Do so only on a network that you trust. Otherwise keep "
        "127.0.0.1 and have others come by `ssh -L 7300:127.0.0.1:7300 THIS_MACHINE`, or put a proxy that speaks TLS "
        "in front and give them its https:// address. Give people `elastune token STUDY` instead of your own token"
    )
