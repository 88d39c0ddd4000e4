"""A real Chromium for tests of what people see in a browser.

``CHROMIUM=PATH`` names one. Else it is the one on the PATH, else Debian's package is installed where there is
the right to do so. ``python -m support.browser`` prints its path, getting it first if need be.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Final

from rebalanser.testing.servers import ServerMissing, SourceFailed, exclusive, run
from rebalanser.testing.waiting import PATIENCE_S

VARIABLE: Final = "CHROMIUM"
"""The environment variable that names the browser to use."""
COMMANDS: Final = ("chromium", "chromium-browser", "google-chrome")
HINT: Final = f"set {VARIABLE} to the path of a Chromium, or install one (Debian: apt-get install chromium)"
ARGUMENTS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
)
"""What a browser in a container and without a screen needs; it asks the network for nothing by itself."""


class BrowserMissing(ServerMissing):
    """No Chromium could be found or had; the message says of each way why."""


def find_chromium() -> Path | None:
    """The Chromium that ``$CHROMIUM`` names, else the first one on the PATH.

    Raises:
        BrowserMissing: the environment variable names what cannot be run.
    """
    if named := os.environ.get(VARIABLE):
        found = shutil.which(named)
        if found is None:
            raise BrowserMissing(f"{VARIABLE}={named} can't be run")
        return Path(found)
    return next((Path(found) for command in COMMANDS if (found := shutil.which(command))), None)


def install_chromium() -> Path:
    """A Chromium; where there is none, Debian's package is installed. Parallel callers wait for each other.

    Raises:
        BrowserMissing: there is none and it can't be had; the message says why.
    """
    if found := find_chromium():
        return found
    with exclusive("chromium"):
        if found := find_chromium():
            return found
        try:
            _install_debian_package()
        except SourceFailed as failed:
            raise BrowserMissing(f"no Chromium: {HINT}\n{failed}") from failed
        if found := find_chromium():
            return found
    raise BrowserMissing(f"no Chromium: {HINT}\nDebian: the package brought no command of that name")


def _install_debian_package() -> None:
    installer = shutil.which("apt-get")
    if installer is None:
        raise SourceFailed("Debian: no apt-get command on the PATH")
    if os.geteuid() != 0:
        raise SourceFailed("Debian: only root may install packages")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = (installer, "install", "-y", "-q", "--no-install-recommends", "chromium", "fonts-dejavu-core")
    try:
        run("Debian", command, env=environment, timeout=5 * PATIENCE_S)
    except SourceFailed:
        run("Debian", (installer, "update", "-q"), env=environment, timeout=5 * PATIENCE_S)
        run("Debian", command, env=environment, timeout=5 * PATIENCE_S)


def main() -> int:
    """Print the path of a Chromium, or to stderr why there is none."""
    try:
        print(install_chromium())
    except BrowserMissing as missing:
        print(missing, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
