"""Where other hosts find this one."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915


def own_addresses() -> list[str]:
    """This host's IPv4 addresses, the loop back to itself last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _number, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without one
                request = struct.pack("256s", name.encode()[:15])
                address = socket.inet_ntoa(fcntl.ioctl(asked, SIOCGIFADDR, request)[20:24])
                found.append(address)
    return sorted(found, key=lambda x: x.startswith("127."))
