"""No queue grows without a bound: a slow reader must never cost all memory."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "rebalanser").rglob("*.py"), *(ROOT / "backends").rglob("*.py")])
BOUNDED_OTHERWISE = {
    "backends/rebalanser_etcd/watches.py": (2, "requests of this node's watches, dropped with their stream"),
    "rebalanser/runtime/supervisor_shim.py": (
        1,
        "a few lines for each child, which are as many as resources",
    ),
    "rebalanser/cli/supervisor.py": (1, "a start, an exit and one request to stop of one child process"),
    "rebalanser/history/sinks.py": (1, "one batch of a buffer that has a limit"),
    "backends/rebalanser_kafka/neli/candidate.py": (
        1,
        "a return of each partition's handlers, a count, answers to 8 commits, and what the application asks",
    ),
    "backends/rebalanser_kafka/shiva/cluster.py": (1, "one batch: its follower waits until it is taken"),
    "backends/rebalanser_kafka/shiva/leader.py": (1, "a batch of each of two topics, and what deposes it"),
    "backends/rebalanser_kafka/shiva/worker.py": (
        1,
        "a batch of each of two topics, and an answer to each request for files or a process",
    ),
    "rebalanser/core/allocation/anti_affinity.py": (2, "each worker or replica of one search once"),
    "rebalanser/core/shiva/runs.py": (1, "restarts within the window, of which so many are allowed"),
    "backends/rebalanser_sqlite/tasks/group_commit.py": (1, "a job of each thread that waits for its answer"),
    "rebalanser/cli/audit_stream.py": (
        1,
        "a note of each micro-batch, which takes far longer than to print it",
    ),
    "rebalanser/cli/tasks_options.py": (
        1,
        "no queue of this process: one of tasks, which lies in its engine",
    ),
    "rebalanser/core/tasks/writes.py": (
        2,
        "what callers wait for, and the claims that a worker has room for",
    ),
    "rebalanser/tasks/execution/worker.py": (1, "claims, of which there are no more than it has room for"),
    "rebalanser/testing/memory.py": (1, "what is told within one call"),
}
"""How many queues of a file are bounded by what is put into them, and by what."""
QUEUES = {"Queue", "LifoQueue", "PriorityQueue", "SimpleQueue", "deque"}


def unbounded(tree: ast.AST) -> list[int]:
    """The lines at which a queue is made that has no limit."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in QUEUES
        and not any(keyword.arg in {"maxsize", "maxlen"} for keyword in node.keywords)
    ]


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("queue.Queue()", [1]),
        ("SimpleQueue()", [1]),
        ("asyncio.Queue()", [1]),
        ("queue.Queue(maxsize=2)", []),
        ("collections.deque()", [1]),
        ("deque(maxlen=10)", []),
    ],
)
def test_the_check_sees_what_it_looks_for(code: str, lines: list[int]) -> None:
    assert unbounded(ast.parse(code)) == lines


def test_every_queue_has_a_limit() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in SOURCES}
    with_queues = {path for path, text in texts.items() if any(queue in text for queue in QUEUES)}
    found = {path: unbounded(ast.parse(texts[path])) for path in with_queues}
    excused = {path: count for path, (count, _) in BOUNDED_OTHERWISE.items()}
    wrong = {path: lines for path, lines in found.items() if len(lines) != excused.get(path, 0)}
    assert not wrong, "lines of queues without a limit"


def test_no_excuse_is_outdated() -> None:
    assert {path.relative_to(ROOT).as_posix() for path in SOURCES} >= BOUNDED_OTHERWISE.keys()
