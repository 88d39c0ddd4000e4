"""``make audit-demo``: the demo, and then what its history proves about it.

Runs the demo with a history, audits that history, and writes the tables and the report beside it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run(*command: str | Path) -> int:
    """Run a program of this environment; its exit code."""
    return subprocess.run([sys.executable, *command], check=False).returncode


def show(report: Path) -> None:
    """Open the report where there is a desktop."""
    opener = shutil.which("xdg-open")
    if opener and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        subprocess.Popen([opener, report], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def what_is_missing() -> str | None:
    """Name what the audit needs and this machine lacks, before the demo runs for its history."""
    if importlib.util.find_spec("pyspark") is None:
        return "Spark: pip install 'rebalanser[spark]'"
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        return "Java 17 or 21: install it, or set JAVA_HOME"
    return None


def main() -> int:
    """Do what the command line says; the exit code of the first program that fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--registry", choices=("sqlite", "etcd", "kafka"), default="sqlite")
    parser.add_argument("--folder", type=Path, help="where to keep everything; default: a new folder")
    arguments = parser.parse_args()
    if missing := what_is_missing():
        print(f"the audit needs {missing}", file=sys.stderr)
        return 1
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="rebalanser-audit-"))
    history, out, report = folder / "history", folder / "audit", folder / "report.html"
    code = run(HERE / "demo.py", "--registry", arguments.registry, "--history", history)
    if code:
        return code
    options = ["--out", str(out), "--report", str(report), "--fail-on-findings"]
    code = run("-m", "rebalanser", "audit", str(history), *options)
    if report.exists():
        show(report)
    return code


if __name__ == "__main__":
    sys.exit(main())
