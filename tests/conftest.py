"""Fixtures that several folders of tests share: real etcd and Kafka servers, and logging as it was."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import uuid
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hypothesis
import pytest
import pytest_timeout

from rebalanser.errors import MissingExtra
from rebalanser.runtime.logs import ROOT, DefaultHandler
from rebalanser.testing import etcd_server, kafka_server
from rebalanser.testing.etcd_server import EtcdCluster, EtcdMissing
from rebalanser.testing.kafka_server import KafkaCluster, KafkaMissing
from rebalanser.testing.waiting import patience_ratio
from support import browser
from support.browser import BrowserMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pyspark.sql import SparkSession

    from simulation.kernel.mutants import Caught


pytest.register_assert_rewrite(
    "rebalanser.testing.registry_suite",
    "rebalanser.testing.coordinator_suite",
    "rebalanser.testing.engine_suite",
)

# The processes that tests start find the simulators and the support modules, as the tests do.
_TESTS = str(Path(__file__).parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_TESTS, os.environ.get("PYTHONPATH", ""))))

# A busy machine fails no example for its time, and every run tries the same examples.
hypothesis.settings.register_profile("rebalanser", deadline=None, derandomize=True)
hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("rebalanser"), max_examples=15)
hypothesis.settings.load_profile("rebalanser")

NEEDS = {
    "browser": {"chromium"},
    "etcd": {"etcd", "etcd_binary", "etcd_cluster", "etcd_url"},
    "kafka": {"kafka", "kafka_address", "kafka_cluster", "kafka_libraries", "spark_kafka"},
    "spark": {"spark", "spark_kafka"},
}
"""The fixtures by which a test needs each real part; a test marks what its fixtures ask for by name."""


@pytest.hookimpl(tryfirst=True)  # pytest selects by marks, and xdist reads them, in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what each test needs, and keep all tests on Spark in one worker.

    A Spark session takes seconds to start and a gibibyte of memory.
    """
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        for need, names in NEEDS.items():
            if fixtures & names:
                item.add_marker(need)
        if "faults" in item.path.parts:
            item.add_marker("slow")
        chunk = item.callspec.params.get("chunk", 0) if hasattr(item, "callspec") else 0
        if chunk or not {"audit", "e2e"}.isdisjoint(item.path.parts):
            item.add_marker("full_size")
        if "spark" in fixtures:
            item.add_marker(pytest.mark.xdist_group("spark"))
            item.add_marker(_LEFT_TO_THE_COLLECTOR)


def _part_of(nodeid: str, marks: Iterable[str]) -> str:
    """The part of the suite that a test belongs to: its folder, and what it needs."""
    return ", ".join([nodeid.split("/")[1], *(need for need in NEEDS if need in marks)])


class Costs:
    """Prints how long each part of the suite took, and how many tests were left out by their marks."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._tests: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Count the tests that the marks leave out."""
        self.left_out.update(_part_of(item.nodeid, item.keywords) for item in items)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send a worker's count to the controller, which collects no test itself."""
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["left_out"] = dict(self.left_out)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over a worker's count; all workers collect the same tests."""
        self.left_out = Counter(getattr(node, "workeroutput", {}).get("left_out", self.left_out))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the time of a test, its fixtures included."""
        part = _part_of(report.nodeid, report.keywords)
        self._seconds[part] += report.duration
        self._tests[part] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print both tables before pytest's own summary."""
        if len(self._tests) > 1:
            terminalreporter.section("cost by part")
            for part, seconds in self._seconds.most_common():
                terminalreporter.write_line(f"{seconds:8.1f} s {self._tests[part]:6,} tests  {part}")
        if self.left_out:
            terminalreporter.section("left out")
            for part, tests in self.left_out.most_common():
                terminalreporter.write_line(f"{tests:17,} tests  {part}")


def pytest_configure(config: pytest.Config) -> None:
    """Count costs in the controller, and what was left out in every process."""
    config.pluginmanager.register(Costs(), "costs")


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> object:
    """Scale the timeout of every test as its waits are scaled."""
    scaled = settings._replace(timeout=settings.timeout * patience_ratio())
    return pytest_timeout.pytest_timeout_set_timer(item, scaled)


# PySpark leaves the sockets that it collects results through to the garbage collector.
_LEFT_TO_THE_COLLECTOR = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Have the garbage of a test on Spark collected in that test, which may leave sockets unclosed."""
    if "spark" in getattr(item, "fixturenames", ()):
        gc.collect()


@pytest.fixture
def forget_modules(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have a package imported anew. The modules from before are back after the test.

    A package is also an attribute of the one that it is in, and an import sets that too.
    """

    def forget(package: str) -> None:
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
            monkeypatch.delitem(sys.modules, name)
        parent, _, child = package.rpartition(".")
        if parent:
            monkeypatch.delattr(sys.modules[parent], child, raising=False)

    return forget


def missing(service: str, hint: str) -> NoReturn:
    """Skip on a laptop, fail in CI: there a missing service would hide what the tests hold."""
    if os.environ.get("CI", "").lower() in {"1", "true", "yes"}:
        pytest.fail(f"{service} is required in CI: {hint}")
    pytest.skip(f"{service} is missing: {hint}")


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Let files that are made be for everybody, unless their maker says otherwise."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture
def permissions_count() -> Iterator[None]:
    """Take from the superuser, in this thread, what lets it read and write every file.

    Another user could not import from an interpreter in the superuser's home. Encodings are imported when
    they are first used, and Python remembers one that it did not find as unknown.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    thread = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3
    before, without = (ctypes.c_uint32 * 6)(), (ctypes.c_uint32 * 6)()
    assert libc.capget(thread, before) == 0, os.strerror(ctypes.get_errno())
    without[:] = before[:]
    without[0] &= ~0b110  # of the effective ones CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    assert libc.capset(thread, without) == 0, os.strerror(ctypes.get_errno())
    yield
    assert libc.capset(thread, before) == 0, os.strerror(ctypes.get_errno())


@pytest.fixture(scope="session")
def etcd_binary() -> Path:
    """An etcd binary, got if there is none yet, for tests whose subject starts servers by itself."""
    try:
        return etcd_server.install_etcd()
    except EtcdMissing:
        missing("etcd", etcd_server.HINT)


@pytest.fixture(scope="session")
def etcdutl() -> Path:
    """The program that restores etcd's snapshots, got if there is none yet."""
    try:
        return etcd_server.install_etcdutl()
    except EtcdMissing:
        missing("etcdutl", etcd_server.HINT)


@pytest.fixture(scope="session")
def kafka_libraries() -> Path:
    """The folder of Kafka's jars, got if there is none yet, for tests whose subject starts brokers."""
    try:
        return kafka_server.install_kafka()
    except KafkaMissing:
        missing("Kafka", kafka_server.HINT)


def _started_etcd(cluster: EtcdCluster) -> Iterator[EtcdCluster]:
    try:
        cluster.start()
    except EtcdMissing:
        missing("etcd", etcd_server.HINT)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One etcd server of this worker, shared by its tests: each uses keys of its own."""
    yield from _started_etcd(EtcdCluster(1, data_folder=tmp_path_factory.mktemp("etcd")))


@pytest.fixture(scope="session")
def etcd_url(request: pytest.FixtureRequest) -> str:
    """The URL of the etcd named by the environment variable ``ETCD``, else of this worker's own server."""
    if endpoints := etcd_server.endpoints_from_environment():
        return f"etcd://{','.join(endpoints)}"
    own: EtcdCluster = request.getfixturevalue("etcd")
    return own.url()


@pytest.fixture(params=["sqlite", "memory", "etcd"])
def engine_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store of tasks, of each engine."""
    name = uuid.uuid4().hex
    urls = {"sqlite": f"sqlite:///{tmp_path}/tasks.db", "memory": f"memory://{name}"}
    return urls.get(request.param) or f"{request.getfixturevalue('etcd_url')}/tasks/{name}"


@pytest.fixture(scope="session")
def etcd_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """Three etcd members of this worker; a test that breaks one restarts it before it ends."""
    yield from _started_etcd(EtcdCluster(3, data_folder=tmp_path_factory.mktemp("etcd-cluster")))


def _started_kafka(cluster: KafkaCluster) -> Iterator[KafkaCluster]:
    try:
        cluster.start()
    except KafkaMissing:
        missing("Kafka", kafka_server.HINT)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """One Kafka broker of this worker, shared by its tests: each uses topics of its own."""
    yield from _started_kafka(KafkaCluster(1, data_folder=tmp_path_factory.mktemp("kafka")))


@pytest.fixture(scope="session")
def kafka_address(request: pytest.FixtureRequest) -> str:
    """``HOST:PORT,…`` of the Kafka named by the environment variable ``KAFKA``, else of this worker's own."""
    if addresses := kafka_server.addresses_from_environment():
        return ",".join(addresses)
    own: KafkaCluster = request.getfixturevalue("kafka")
    return own.bootstrap


@pytest.fixture(scope="session")
def kafka_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """Three Kafka brokers of this worker; a test that breaks one restarts it before it ends."""
    yield from _started_kafka(KafkaCluster(3, data_folder=tmp_path_factory.mktemp("kafka-cluster")))


@pytest.fixture(scope="session")
def chromium() -> Path:
    """A Chromium, got if there is none yet, for tests of what people see."""
    try:
        return browser.install_chromium()
    except BrowserMissing as error:
        missing("Chromium", str(error))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one Spark session of this run: two cores, two shuffle partitions, with Kafka if that can be had.

    It interprets its plans: compiling them takes far longer than the few records of a test. The commands that
    the tests of whole programs start compile them.
    """
    interpreted = {
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }
    from rebalanser.audit.session import KafkaConnectorMissing, SparkUnusable, session

    def started(*, kafka: bool) -> SparkSession:
        return session(
            "local[2]",
            kafka=kafka,
            memory="2g",
            local_dir=tmp_path_factory.mktemp("spark"),
            conf={"spark.sql.shuffle.partitions": "2", **interpreted},
        )

    interrupted = signal.getsignal(signal.SIGINT)
    try:
        try:
            spark = started(kafka=True)
        except KafkaConnectorMissing:
            spark = started(kafka=False)
    except (MissingExtra, SparkUnusable) as error:
        missing("Spark", str(error))
    finally:
        signal.signal(signal.SIGINT, interrupted)  # PySpark has put its own handler there
    yield spark
    spark.stop()


@pytest.fixture(scope="session")
def spark_kafka(spark: SparkSession) -> SparkSession:
    """The same session, for tests that read Kafka with it."""
    if not spark.conf.get("spark.jars.packages", ""):
        missing("Spark's Kafka connector", "it is got from Maven: check the network")
    return spark


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP is not ignored, as it is below ``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def _library_logging_as_imported() -> Iterator[None]:
    """Undo what a test, or a fixture that outlives it, configured for the library's logging."""
    yield
    root = logging.getLogger(ROOT)
    root.handlers[:] = [handler for handler in root.handlers if isinstance(handler, DefaultHandler)]
    root.setLevel(logging.NOTSET)
    root.propagate = True


@pytest.fixture(scope="session")
def caught() -> Iterator[Callable[[Caught], None]]:
    """``caught(found)`` notes which mutant was caught; a table of all is printed when all is done."""
    from rich.console import Console

    from simulation.kernel.mutants import table_of

    found: list[Caught] = []
    yield found.append
    Console(width=170).print("\n", table_of(found))
