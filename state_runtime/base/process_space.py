"""The scope of a process id: the same number in another container, or after a reboot, is another process."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["is_our_space", "process_space"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


def process_space(boot: Path = _BOOT, namespace: Path = _NAMESPACE) -> str:
    """Return the id of this process's space: kernel boot and namespace of process ids (pid_namespaces(7)).

    Two processes with the same id see each other under the same numbers. Containers of one host may share its name and
    its boot, but have separate namespaces. A namespace's number may be reused once its last process has ended: a
    process that is searched for in the later namespace and not found has ended with the first one.

    Returns:
        Empty if the system does not tell (other than Linux, or /proc is hidden): then no process is known to be near.
    """
    try:
        return f"{boot.read_text().strip()}:{os.stat(namespace).st_ino}"
    except OSError:
        return ""


def is_our_space(told: str) -> bool:
    """Return whether a process id from a space of that id may belong to this process's space. If no space was recorded
    (earlier versions, a run that has not reported yet, other systems), the name of the host must suffice."""
    return not told or told == process_space()
