"""Tells the addresses of this machine from others."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_local(authority: str) -> bool:
    """True for a loopback host, with or without a port."""
    host, _, port = authority.rpartition(":")
    return is_loopback(host) if host and port.isdigit() else is_loopback(authority)
