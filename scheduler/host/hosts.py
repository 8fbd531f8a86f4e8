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
    """Return an address at which this machine's own processes reach what listens on ``host``."""
    return "127.0.0.1" if host in ANY else host


def open_host_warning(host: str) -> str:
    where = "all networks of this machine" if host in ANY else f"the network of {host}"
    return (
        f"WARNING: the scheduler can be reached from {where}, and its traffic is not encrypted: whoever can listen "
        "there learns the token, and can run code as you with it. Do this only on a network that you trust. "
        "Otherwise keep 127.0.0.1 and let others connect with `ssh -L 7300:127.0.0.1:7300 THIS_MACHINE`, or put a "
        "TLS proxy in front and give them its https:// address. Give people the token that `elastune token STUDY` "
        "prints instead of your own"
    )
