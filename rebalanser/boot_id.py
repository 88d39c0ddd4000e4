"""The name of the present run of this host: what tells times of its clock from those after a reboot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

LINUX: Final = Path("/proc/sys/kernel/random/boot_id")
_DARWIN: Final = ("/usr/sbin/sysctl", "-n", "kern.bootsessionuuid")


def boot_id() -> str:
    """Return an id of this run of the host's kernel, which no other run has.

    Raises:
        OSError: this platform has none.
    """
    told = _told().strip()
    if not told:
        raise OSError("the kernel has an empty boot id")
    return told


def _told() -> str:
    if sys.platform != "darwin":
        return LINUX.read_text(encoding="ascii")
    try:
        return subprocess.run(_DARWIN, check=True, capture_output=True, text=True).stdout  # noqa: S603
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error
