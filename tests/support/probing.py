"""What the kernel says of the connections of this machine."""

from pathlib import Path

_KEEP_ALIVE = "02"
"""The timer in /proc/net/tcp of a connection that is probed while it is silent."""


def probed(port: int) -> int:
    """Returns how many ends of the connections to a port of 127.0.0.1 the kernel probes."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    mine = [fields for fields in lines if f"0100007F:{port:04X}" in fields[1:3]]
    return sum(fields[5].partition(":")[0] == _KEEP_ALIVE for fields in mine)
