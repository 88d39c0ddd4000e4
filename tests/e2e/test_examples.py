"""Every example runs, and does what it says."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from rebalanser.testing.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run an example to its end."""
    runner = [sys.executable] if program.endswith(".py") else ["bash"]
    return subprocess.run(
        [*runner, str(EXAMPLES / program), *arguments],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@contextmanager
def sharding(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the sharding example, gone when the context ends."""
    program = [sys.executable, str(EXAMPLES / "consumer_group_sharding.py")]
    place = ["--registry", f"sqlite:///{folder / 'groups.db'}", "--folder", str(folder / "stream")]
    process = subprocess.Popen(
        [*program, *place, *arguments], env={**os.environ, "REBALANSER_LEASE_TTL_S": "3"}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ended(process: subprocess.Popen[bytes]) -> int:
    """Ask a process to stop, and wait for it."""
    process.send_signal(signal.SIGTERM)
    return process.wait(PATIENCE_S)


def accepted(folder: Path) -> dict[str, int]:
    """The batches that the sink accepted from each worker."""
    try:
        with closing(sqlite3.connect(f"file:{folder / 'stream' / 'sink.db'}?mode=ro", uri=True)) as sink:
            return dict(sink.execute("SELECT writer, count(*) FROM accepted GROUP BY writer"))
    except sqlite3.OperationalError:
        return {}


@pytest.mark.rule("RB-2", "RB-26")
def test_sharding_counts_every_line_once_while_workers_come_and_go(tmp_path: Path) -> None:
    with (
        sharding(tmp_path, "produce", "--lines-per-second", "3000") as producer,
        sharding(tmp_path, "worker", "--node", "a") as first,
    ):
        wait_until(lambda: accepted(tmp_path).get("a", 0) > 10, "the first worker works")
        with sharding(tmp_path, "worker", "--node", "b") as second:
            wait_until(lambda: accepted(tmp_path).get("b", 0) > 10, "the second worker works")
            assert ended(first) == 0
            assert ended(producer) == 0
            check = ("--folder", str(tmp_path / "stream"), "check")
            wait_until(lambda: run("consumer_group_sharding.py", *check).returncode == 0, "all is counted")
            assert ended(second) == 0
    found = run("consumer_group_sharding.py", *check)
    assert found.returncode == 0, found.stderr
    assert re.search(r"^lines lost +0$", found.stdout, re.MULTILINE)
    assert re.search(r"^lines accepted twice +0$", found.stdout, re.MULTILINE)


def test_sharding_has_one_line_for_a_mistake(tmp_path: Path) -> None:
    for arguments in (["--registry", "nosuch://x", "worker"], ["check"]):
        found = run("consumer_group_sharding.py", "--folder", str(tmp_path), *arguments)
        assert found.returncode == 1
        assert len(found.stderr.splitlines()) == 1, found.stderr


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An example as a module, which finds its neighbours as it does when it is run."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.rule("RB-27")
def test_the_sink_refuses_the_owner_before_from_the_claim_of_the_next_one_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = load("stdlib_stream", monkeypatch)
    sharding = load("consumer_group_sharding", monkeypatch)
    batch = stream.Batch(0, 20, (("a.py", "two words"), ("a.py", "")))
    with (
        closing(sharding.FencedSink(tmp_path / "sink.db", "old")) as old,
        closing(sharding.FencedSink(tmp_path / "sink.db", "new")) as new,
    ):
        assert old.claim("p", 5) == 0
        old.accept("p", 5, batch)
        assert new.claim("p", 6) == 20
        for stale, arguments in ((old.accept, ("p", 5, batch)), (old.claim, ("p", 5))):
            with pytest.raises(sharding.Refused, match="token 5 is older than 6"):
                stale(*arguments)
        assert old.claim("q", 5) == 0, "another partition is not concerned"
    with closing(sqlite3.connect(tmp_path / "sink.db")) as sink:
        assert sink.execute("SELECT * FROM counts").fetchall() == [("a.py", 2, 2)]
        assert sink.execute("SELECT * FROM accepted").fetchall() == [("p", 0, 20, 2, 5, "old")]
        assert sink.execute("SELECT * FROM refused").fetchall() == [("p", 5, 6, "old")] * 2
        assert sink.execute("SELECT * FROM fence WHERE partition = 'p'").fetchall() == [("p", 6, 20)]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("DELETE FROM accepted WHERE first = 0", {"lines lost"}),
        ("INSERT INTO accepted SELECT * FROM accepted WHERE first = 0", {"lines accepted twice"}),
        ("UPDATE counts SET words = words + 1", {"files counted wrongly"}),
    ],
)
def test_the_comparison_sees_what_is_lost_doubled_or_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, expected: set[str]
) -> None:
    stream_module = load("stdlib_stream", monkeypatch)
    sharding = load("consumer_group_sharding", monkeypatch)
    comparison = load("comparison", monkeypatch)
    stream = stream_module.Stream(tmp_path, partitions=2)
    with closing(sharding.FencedSink(tmp_path / "sink.db", "a")) as sink:
        stopped = threading.Event()
        monkeypatch.setattr(stream_module, "sources", lambda: ["abc.py", "this.py", "keyword.py"])
        stream.produce(1000, stopped)
        for token, partition in enumerate(stream.partitions, 1):
            position = sink.claim(partition, token)
            while (batch := stream.read(partition, position, limit_bytes=500)).records:
                sink.accept(partition, token, batch)
                position = batch.last
            if partition == stream.partitions[0]:
                underway = comparison.compare(stream, tmp_path / "sink.db")
                assert (underway.lost, underway.wrong_files) == (0, ()), "a partition still waits"
                assert underway.waiting > 0
                assert not underway.exact
    assert comparison.compare(stream, tmp_path / "sink.db").exact
    with closing(sqlite3.connect(tmp_path / "sink.db")) as database:
        database.execute(damage)
        database.commit()
    found = comparison.compare(stream, tmp_path / "sink.db")
    assert not found.exact
    figures = {line[:24].strip(): line[24:].strip() for line in found.lines()}
    wrong = {
        name
        for name in ("lines lost", "lines accepted twice", "files counted wrongly")
        if figures[name] != "0"
    }
    assert wrong == expected


@pytest.mark.rule("RB-2", "RB-12", "RB-26")
def test_asyncio_example(tmp_path: Path) -> None:
    found = run("asyncio_group.py", "--seconds", "4", "--registry", f"sqlite:///{tmp_path / 'groups.db'}")
    assert found.returncode == 0, found.stderr
    halves = re.search(r"^a owns (\[.*\]), b owns (\[.*\])$", found.stdout, re.MULTILINE)
    assert halves
    assert [half.count("feed-") for half in halves.groups()] == [3, 3]
    tokens: dict[str, list[int]] = {}
    for feed, token in re.findall(r"begins to poll (\S+) \(token (\d+)\)", found.stdout):
        tokens.setdefault(feed, []).append(int(token))
    assert all(each == sorted(set(each)) for each in tokens.values())
    assert max(map(len, tokens.values())) == 3, "from a to b and back"


@pytest.mark.rule("RB-36", "RB-37")
def test_gpu_workers_example() -> None:
    found = run("gpu_workers.py")
    assert found.returncode == 0, found.stderr
    nodes = re.findall(r"^(\S+) \((\d+) of (\d+)\): (.*)$", found.stdout, re.MULTILINE)
    jobs = {label: owned.split(", ") for label, _, _, owned in nodes}
    assert jobs.keys() == {"gpu-large", "gpu-small", "plain"}
    assert sorted(job for owned in jobs.values() for job in owned) == [
        *(f"report-{number}" for number in range(6)),
        *(f"train-{number}" for number in range(3)),
    ]
    assert not any(job.startswith("train") for job in jobs["plain"])
    assert all(int(load) <= int(capacity) for _, load, capacity, _ in nodes)
    assert re.search(
        r"^nobody owns render: no node has all of the tags display, gpu: the nearest, gpu-large, has gpu$",
        found.stdout,
        re.MULTILINE,
    )


@pytest.mark.rule("RB-39")
def test_rolling_deploy_example() -> None:
    found = run("rolling_deploy.py", "--processes", "3", "--resources", "6")
    assert found.returncode == 0, found.stderr
    cost = dict(re.findall(r"^(with.*): (.*)$", found.stdout, re.MULTILINE))
    assert list(cost) == ["without a grace", "with a grace", "with a grace, and surge"]
    assert not cost["without a grace"].startswith("6 starts, 0 moves")
    for way in ("with a grace", "with a grace, and surge"):
        assert cost[way].startswith("6 starts, 0 moves between labels, unowned p50"), cost[way]
    assert "not measured, give --kafka HOST:PORT" in found.stdout


@pytest.mark.rule("RB-12", "RB-26")
def test_any_language_example() -> None:
    scripts = Path(sys.executable).parent
    for seconds in ("8", "30"):  # under load the first node may not have begun when it has to leave
        found = run("any_language.sh", seconds, PATH=f"{scripts}{os.pathsep}{os.environ['PATH']}")
        assert found.returncode == 0, found.stderr
        arrivals = re.findall(r"^([ab]): (queue-\d) arrived with token (\d+)$", found.stdout, re.MULTILINE)
        if any(node == "a" for node, _, _ in arrivals):
            break
    for name in {queue for _, queue, _ in arrivals}:
        tokens = [int(token) for _, queue, token in arrivals if queue == name]
        assert tokens == sorted(set(tokens)), found.stdout
    assert {queue: node for node, queue, _ in arrivals} == {f"queue-{n}": "b" for n in range(1, 5)}
    assert {node for node, _, _ in arrivals} == {"a", "b"}


@pytest.mark.rule("SK-5", "SK-17")
def test_the_pipeline_of_tasks_survives_a_killed_worker(tmp_path: Path) -> None:
    done = run("tasks_pipeline.py", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.search(r"a worker was killed after \d+ tasks", done.stdout)
    assert re.search(r"\d+ tasks were tried again; equal to a direct run: True", done.stdout)


def test_the_audit_demo_says_at_once_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    demo = load("audit_demo", monkeypatch)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyspark" else find(name))
    monkeypatch.setattr(sys, "argv", ["audit_demo.py", "--folder", str(tmp_path)])
    monkeypatch.setattr(demo, "run", pytest.fail)
    assert demo.main() == 1
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert "Java" in demo.what_is_missing()
