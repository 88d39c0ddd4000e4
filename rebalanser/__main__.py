"""``rebalanser`` and ``python -m rebalanser``: the command line, from its first moment on."""

import os
import signal
import sys
from typing import Final

INTERRUPTED: Final = 130


def entry() -> int:
    """Run the command line of this process and return its exit code.

    Importing it takes a moment: Ctrl-C ends that without a traceback, as it does later.
    """
    owns_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if owns_interrupt:
        signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(INTERRUPTED))
    from rebalanser.cli import main  # noqa: PLC0415 - what may be interrupted

    if owns_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


if __name__ == "__main__":
    sys.exit(entry())
