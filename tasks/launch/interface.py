"""The network interface of a host over which its ranks exchange gradients."""

import ipaddress
import socket

import psutil


def choose_interface(wanted: str, address: str | None) -> str:
    """Return the name of the wanted interface, or of that with an address.

    Raises:
        ValueError: There is none.
    """
    names = [name for _, name in socket.if_nameindex()]
    if wanted:
        if wanted not in names:
            raise ValueError(f"its interfaces are {', '.join(names)}, not '{wanted}'")
        return wanted
    found = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(one.address.partition("%")[0] == address for one in addresses)
    ]
    if found:
        return found[0]
    if address is not None and ipaddress.ip_address(address).is_loopback:
        return "lo"  # Linux has all of 127.0.0.0/8 there, and shows the first address only.
    raise ValueError(f"none of its interfaces has the address {address}: name one in distributed.interface")
