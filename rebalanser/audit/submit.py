"""The entry script for ``spark-submit``: the command ``rebalanser audit`` with the options that follow.

``python -m rebalanser.audit.submit --path`` prints the path of this file, for::

    spark-submit --master yarn "$(python -m rebalanser.audit.submit --path)" hdfs:///history --out hdfs:///audit

The master and the memory are those of ``spark-submit``.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run ``rebalanser audit`` with this process's arguments, or print the path of this file."""
    if sys.argv[1:] == ["--path"]:
        sys.stdout.write(f"{Path(__file__).resolve()}\n")
        return
    # Python looks for modules beside a script first, and modules here have names that others have too.
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    sys.argv[1:1] = ["audit"]
    runpy.run_module("rebalanser", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
