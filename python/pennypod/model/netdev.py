"""How many bytes a machine has received and sent, from Linux's own count. Floor 0."""

from __future__ import annotations

PATH = "/proc/net/dev"


def received_and_sent(text: str) -> tuple[int, int] | None:
    """The sums over all interfaces but loopback in the text of /proc/net/dev; None when it is something else."""
    received = sent = 0
    found = False
    for line in text.splitlines():
        name, colon, numbers = line.partition(":")
        columns = numbers.split()
        if not colon or len(columns) < 16 or not all(column.isdigit() for column in columns):
            continue
        found = True
        if name.strip() != "lo":
            received += int(columns[0])
            sent += int(columns[8])
    return (received, sent) if found else None
