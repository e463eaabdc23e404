"""Who asks over HTTP: somebody on this machine, or elsewhere. Pure."""

from __future__ import annotations

import ipaddress


def is_from_here(reader: str, reached: str) -> bool:
    """Tell whether a connection is of this machine, by the IP addresses of its two ends.

    The kernel lets nothing in that only claims to come from an address of its own (accept_local,
    Documentation/networking/ip-sysctl.rst).
    """
    address = ipaddress.ip_address(reader)
    return ((address.version == 6 and address.ipv4_mapped) or address).is_loopback or reader == reached


def names_this_machine(host: str) -> bool:
    """Tell whether a Host header names localhost or an address; an HTTP/1.0 client may send none."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.strip("[]").lower()
    if not name or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
