"""Hash and index the files of the interpreter's own library with tasks, kill a worker in the middle, compare.

The steps depend on each other: the files of each folder are hashed in tasks of a few files each; a task after
them puts the folder's hashes together; and one after all folders writes the index. Two worker processes share
the work, and one of them is killed with ``kill -9`` half way. In the end the index must be the one that a
plain loop gives, to the byte.

    python examples/tasks_pipeline.py [--url sqlite:////tmp/pipeline.db]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from rebalanser import Settings
from rebalanser.tasks import Claim, Queue, Status

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
FILES_PER_TASK = 20
CLAIM_TTL_S = 3.0
LEASE_TTL_S = 2.0
FOLDERS = 40
"""As many folders of the library, so that it takes seconds."""


def opened(url: str, folder: Path) -> Pipeline:
    """The queue and its functions, as every process opens them."""
    settings = Settings(lease_ttl_s=LEASE_TTL_S)
    state = folder / "state"
    return Pipeline(Queue("index", url, claim_ttl_s=CLAIM_TTL_S, settings=settings, state_folder=state))


class Pipeline:
    """The three steps."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.hash_files = queue.task(retries=5)(hash_files)
        self.join_folder = queue.task(retries=5)(self._join_folder)
        self.write_index = queue.task(retries=5)(self._write_index)

    def _join_folder(self, _claim: Claim, parts: list[str]) -> dict[str, str]:
        """Put the hashes of a folder together, from the results of the tasks that made them."""
        return dict(sorted(pair for part in parts for pair in self._result(part).items()))

    def _write_index(self, claim: Claim, folders: list[str], target: str) -> int:
        """Write the whole index in one step, so that a try that is cut off leaves none behind."""
        index = dict(sorted(pair for folder in folders for pair in self._result(folder).items()))
        draft = Path(f"{target}.{claim.number}")
        draft.write_text(as_text(index))
        draft.replace(target)
        return len(index)

    def _result(self, task: str) -> dict[str, str]:
        result: dict[str, str] = json.loads(self.queue.get(task).state.result or b"{}")
        return result

    def enqueue(self, target: Path) -> str:
        """Enqueue all steps; the id of the last one."""
        joins = []
        for files in by_folder().values():
            parts = self.hash_files.enqueue_many([((batch,), {}) for batch in batches(files)])
            joins.append(self.join_folder.options(after=parts).enqueue(parts))
        return self.write_index.options(after=joins).enqueue(joins, str(target))


def hash_files(_claim: Claim, files: list[str]) -> dict[str, str]:
    """Hash some files of the library."""
    return hashed(files)


def hashed(files: Iterable[str]) -> dict[str, str]:
    return {name: hashlib.sha256((LIBRARY / name).read_bytes()).hexdigest() for name in files}


def by_folder() -> dict[str, list[str]]:
    """The library's modules, by folder."""
    folders: dict[str, list[str]] = defaultdict(list)
    for path in sorted(LIBRARY.rglob("*.py")):
        name = path.relative_to(LIBRARY)
        if "site-packages" not in name.parts:
            folders[str(name.parent)].append(str(name))
    return dict(sorted(folders.items())[:FOLDERS])


def batches(files: Sequence[str]) -> list[list[str]]:
    return [list(files[first : first + FILES_PER_TASK]) for first in range(0, len(files), FILES_PER_TASK)]


def as_text(index: dict[str, str]) -> str:
    return "".join(f"{digest}  {name}\n" for name, digest in index.items())


def work(url: str, folder: Path) -> None:
    """What a worker process does until it is told to stop."""
    with opened(url, folder).queue as queue:
        queue.run(concurrency=2)


def start_worker(url: str, folder: Path) -> subprocess.Popen[bytes]:
    """A worker in a process of its own."""
    return subprocess.Popen(
        [sys.executable, __file__, "--url", url, "--folder", str(folder), "--work"], env=os.environ
    )


def run(url: str, folder: Path) -> bool:
    """Enqueue all, have two workers work, kill one half way; whether the index is the one it must be."""
    target = folder / "index.txt"
    pipeline = opened(url, folder)
    with pipeline.queue as queue:
        last = pipeline.enqueue(target)
        total = sum(queue.count().values())
        print(f"{total} tasks enqueued")
        workers = [start_worker(url, folder) for _ in range(2)]
        try:
            while (done := queue.count().get(Status.COMPLETED, 0)) < total // 2:
                time.sleep(0.01)
            workers[0].kill()
            print(f"a worker was killed after {done} tasks")
            files = queue.wait(last, 3600.0)
        finally:
            workers[1].terminate()
            for worker in workers:
                worker.wait()
        again = sum(1 for each in queue.tasks() if each.state.claim is not None and each.state.claim.number)
    is_equal = target.read_text() == as_text(
        dict(sorted(hashed(name for names in by_folder().values() for name in names).items()))
    )
    print(f"{files} files indexed; {again} tasks were tried again; equal to a direct run: {is_equal}")
    return is_equal


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--url", help="the engine; a new SQLite file if none is named")
    options.add_argument(
        "--folder",
        type=Path,
        help="where the files of the run go; by default a new one, which is deleted",
    )
    options.add_argument("--work", action="store_true", help="be a worker")
    given = options.parse_args()
    with ExitStack() as end:
        folder = given.folder or Path(end.enter_context(TemporaryDirectory(prefix="rebalanser-pipeline-")))
        url = given.url or f"sqlite:///{folder / 'tasks.db'}"
        if given.work:
            work(url, folder)
        else:
            sys.exit(0 if run(url, folder) else 1)


if __name__ == "__main__":
    main()
