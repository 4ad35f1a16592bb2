"""Network addresses of this machine. This file imports no torch."""

from __future__ import annotations

import socket


def listen_on(address: str) -> socket.socket:
    """Listen on a free port of one address only, since the store trusts every process that connects.

    Raises:
        ValueError: The address does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=1024)
    except OSError as error:
        raise ValueError(
            f"Ray's address of this node, {address}, is not one that a process can listen on here ({error.strerror}); "
            "start Ray with --node-ip-address set to the address of an interface of this node"
        ) from None


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine that a connection to a host comes from.

    Raises:
        OSError: The host has no address, or no network leads there.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as query:  # sends nothing
        query.connect(address)
        return str(query.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the network interface of an IPv4 address (Linux); gloo needs its name where host names do not resolve."""
    try:
        import fcntl

        packed = socket.inet_aton(address)
    except (ImportError, OSError):
        return None
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(query, get_address, name.encode().ljust(256, b"\0"))
            except OSError:  # an interface without an address
                continue
            if reply[20:24] == packed:
                return name
    return None
