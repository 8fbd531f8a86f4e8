"""Addresses at which a machine is reached."""

from __future__ import annotations

import socket

import psutil


def address_towards(host: str) -> str:
    """Return this machine's address on the way to ``host``; raise OSError where no way leads there."""
    try:
        known = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, kind, _, _, where = min(known, key=lambda each: each[0] != socket.AF_INET)
        with socket.socket(family, kind) as probe:
            # Sends nothing: the system only looks up the way.
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise OSError(f"there is no network route from here to {host}: {error}") from error


def address_of(interface: str) -> str:
    """Return the interface's IPv4 address, else its IPv6 one; raise OSError where it has none."""
    interfaces = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in interfaces.get(interface, ()):
            if address.family == family:
                return str(address.address).partition("%")[0]
    raise OSError(
        f"there is no network interface {interface!r} with an address here; this machine has "
        f"{', '.join(sorted(interfaces))}"
    )
