"""``python -m rebalanser``: the command line."""

import sys

from rebalanser.cli import main

if __name__ == "__main__":
    sys.exit(main())
