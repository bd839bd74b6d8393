"""Where a process id is one process: the same number in another container, or after a reboot, is somebody else."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["is_our_space", "process_space"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


def process_space(boot: Path = _BOOT, namespace: Path = _NAMESPACE) -> str:
    """The id of this process's space: the boot of the kernel and the namespace of process ids (pid_namespaces(7)).

    Two processes with the same id see each other under the same numbers. Containers of one host may share its name and
    its boot, and have namespaces of their own. A namespace's number may be given to another once its last process has
    ended: who is looked for in the later one and not found has ended with the first.

    Returns:
        Empty where the system does not tell (other than Linux, or /proc is hidden): nothing is then known to be near.
    """
    try:
        return f"{boot.read_text().strip()}:{os.stat(namespace).st_ino}"
    except OSError:
        return ""


def is_our_space(told: str) -> bool:
    """Whether a process id from a space of that id may be one of this process's own. Where nothing was told (earlier
    versions, a run that has not spoken yet, other systems) the name of the host has to do."""
    return not told or told == process_space()
