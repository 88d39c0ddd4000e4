"""``rebalanser`` and ``python -m rebalanser``: the command line, from its first moment on."""

import os
import signal
import sys
from typing import Final

INTERRUPTED: Final = 130


def _open_standard_streams() -> None:
    """Open /dev/null as each standard stream that is closed.

    Otherwise the next file or connection opened takes its number, and each command that is run its output to
    it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def entry() -> int:
    """Run the command line of this process and return its exit code.

    Importing it takes a moment: Ctrl-C ends that without a traceback, as it does later.
    """
    _open_standard_streams()
    owns_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if owns_interrupt:
        signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(INTERRUPTED))
    from rebalanser.cli import main  # noqa: PLC0415 - what may be interrupted

    if owns_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


if __name__ == "__main__":
    sys.exit(entry())
