"""The Kafka brokers that tests and demos start: had by one command, quick, and gone with their parent."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from rebalanser.testing.kafka_server import (
    VERSION,
    KafkaCluster,
    KafkaFailed,
    addresses_from_environment,
    find_java,
    find_kafka,
)
from rebalanser.testing.servers import free_ports
from rebalanser.testing.waiting import PATIENCE_S, wait_until
from support.proxy import TcpProxy

PARENT = """
import signal, sys
from pathlib import Path
from rebalanser.testing.kafka_server import KafkaCluster
cluster = KafkaCluster(data_folder=Path(sys.argv[1]))
cluster.start()
print(cluster.pid(0), flush=True)
signal.pause()
"""
AWAY_S = 3.0
"""Seconds in which nothing is acknowledged, because no broker can."""
FAKE_JAVA = """#!/bin/sh
echo 'openjdk version "17.0.1" 2021-10-19' >&2
"""
SLOW_MAVEN = """#!/bin/sh
echo called >> "$CALLS"
mkdir libs
echo one > libs/kafka-clients-4.3.1.jar
sleep 0.5
echo two > libs/kafka_2.13-4.3.1.jar
"""
FAILING_MAVEN = """#!/bin/sh
mkdir libs
echo one > libs/kafka_2.13-4.3.1.jar
echo '[ERROR] Could not resolve dependencies'
echo '[ERROR] [Help 1]'
exit 1
"""
FAKE_DOCKER = """
import io, tarfile

class errors:
    class DockerException(Exception):
        pass

class Engine:
    def __init__(self):
        self.images = self.containers = self

    def pull(self, image):
        if image != "example/kafka":
            raise errors.DockerException(f"no such image: {image}")

    def create(self, image):
        return self

    def get_archive(self, path):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.addfile(tarfile.TarInfo(path.split("/")[-1] + "/kafka_2.13-3.9.1.jar"))
        return [packed.getvalue()], {}

    def remove(self):
        pass

from_env = Engine
"""


def client_settings(cluster: KafkaCluster, **more: str | float) -> dict[str, Any]:
    """Settings of a client that gives up soon, so that a refusal is seen soon."""
    quick = {
        "socket.timeout.ms": 5000,
        "reconnect.backoff.max.ms": 200,
    }
    return {**quick, **cluster.client_settings, **{name.replace("_", "."): it for name, it in more.items()}}


def new_topic(cluster: KafkaCluster, **config: str) -> str:
    name = f"topic-{uuid.uuid4().hex}"
    topic = NewTopic(name, num_partitions=1, config=config)
    admin = AdminClient(client_settings(cluster))
    admin.create_topics([topic])[name].result(timeout=PATIENCE_S)
    return name


def send(producer: Producer, topic: str, values: list[str], *, within_s: float = PATIENCE_S) -> list[str]:
    """What became of each value: "acknowledged" or an error's name; nothing for one still on its way."""
    outcomes: list[str] = []

    def on_delivery(error: KafkaError | None, _message: object) -> None:
        outcomes.append("acknowledged" if error is None else error.name())

    for value in values:
        producer.produce(topic, key=b"key", value=value, on_delivery=on_delivery)
    producer.flush(within_s)
    return outcomes


def read_to_the_end(cluster: KafkaCluster, topic: str) -> list[str]:
    settings = client_settings(cluster, group_id="none", enable_partition_eof="true")
    consumer = Consumer({**settings, "isolation.level": "read_committed"})
    values: list[str] = []
    with closing(consumer):
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        while (message := consumer.poll(PATIENCE_S)) is not None:
            error = message.error()
            if error is None:
                values.append((message.value() or b"").decode())
            elif error.code() == KafkaError._PARTITION_EOF:
                return values
            else:
                raise KafkaException(error)
    raise TimeoutError(f"{topic} could not be read to its end; so far: {values}")


def refusal(settings: dict[str, Any]) -> int:
    """The code of the first error that says more than that no broker is there."""
    codes: list[int] = []

    def on_error(error: KafkaError) -> None:
        if error.code() not in {KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}:
            codes.append(error.code())

    client = AdminClient(settings | {"error_cb": on_error})
    wait_until(lambda: (client.poll(0.1), codes)[1])
    return codes[0]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_started_broker_takes_records_and_transactions(kafka: KafkaCluster) -> None:
    topic = new_topic(kafka)
    assert send(Producer(client_settings(kafka)), topic, ["plain"]) == ["acknowledged"]
    producer = Producer(client_settings(kafka, transactional_id=topic))
    producer.init_transactions(PATIENCE_S)
    for value, end in (("aborted", producer.abort_transaction), ("committed", producer.commit_transaction)):
        producer.begin_transaction()
        assert send(producer, topic, [value]) == ["acknowledged"]
        end(PATIENCE_S)
    assert read_to_the_end(kafka, topic) == ["plain", "committed"]


@pytest.mark.parametrize(
    "protocol",
    [{"group.protocol": "classic", "session.timeout.ms": 500}, {"group.protocol": "consumer"}],
    ids=["classic", "KIP-848"],
)
def test_a_group_forms_soon(kafka: KafkaCluster, protocol: dict[str, str | int]) -> None:
    topic = new_topic(kafka)
    assert send(Producer(client_settings(kafka)), topic, ["first"]) == ["acknowledged"]
    settings = client_settings(kafka, group_id=topic, auto_offset_reset="earliest")
    consumer = Consumer({**settings, **protocol})
    with closing(consumer):
        consumer.subscribe([topic])
        message = consumer.poll(PATIENCE_S)
        assert message is not None
        assert message.value() == b"first"


def test_compaction_and_deletion_of_old_segments_happen_while_a_test_waits(kafka: KafkaCluster) -> None:
    rolling = {"segment.ms": "100", "min.cleanable.dirty.ratio": "0.01"}
    topic = new_topic(kafka, **rolling, **{"cleanup.policy": "compact"})
    producer = Producer(client_settings(kafka))
    values = [f"value-{number}" for number in range(5)]
    assert send(producer, topic, values) == ["acknowledged"] * 5

    def is_compacted() -> bool:
        # Only a record that comes later than segment.ms closes the segment before it.
        assert send(producer, topic, ["last"]) == ["acknowledged"]
        return set(read_to_the_end(kafka, topic)) == {"last"}

    wait_until(is_compacted)


def test_a_killed_broker_keeps_what_it_acknowledged(kafka: KafkaCluster) -> None:
    topic = new_topic(kafka)
    producer = Producer(client_settings(kafka))
    values = [str(number) for number in range(100)]
    assert send(producer, topic, values) == ["acknowledged"] * 100
    address = kafka.bootstrap
    kafka.kill(0)
    kafka.restart(0)
    assert kafka.bootstrap == address
    assert read_to_the_end(kafka, topic) == values
    assert send(producer, topic, ["after"]) == ["acknowledged"]


def test_a_stopped_broker_ends_by_itself_and_starts_again(kafka: KafkaCluster) -> None:
    topic = new_topic(kafka)
    assert send(Producer(client_settings(kafka)), topic, ["before"]) == ["acknowledged"]
    pid = kafka.pid(0)
    kafka.stop_broker(0)
    assert not is_alive(pid)
    kafka.restart_all()
    assert read_to_the_end(kafka, topic) == ["before"]


def test_a_paused_broker_answers_after_it_resumes(kafka: KafkaCluster) -> None:
    topic = new_topic(kafka)
    producer = Producer(client_settings(kafka))
    assert send(producer, topic, ["before"]) == ["acknowledged"]
    kafka.pause(0)
    try:
        assert send(producer, topic, ["during"], within_s=AWAY_S) == []
    finally:
        kafka.resume(0)
    assert producer.flush(PATIENCE_S) == 0
    kafka.wait_ready()
    assert read_to_the_end(kafka, topic) == ["before", "during"]


def test_three_brokers_survive_the_loss_of_a_leader(kafka_cluster: KafkaCluster) -> None:
    topic = new_topic(kafka_cluster)
    admin = AdminClient(client_settings(kafka_cluster))
    known = wait_until(
        lambda: admin.list_topics(topic, PATIENCE_S).topics[topic].partitions, "each broker knows it"
    )
    leader = known[0].leader
    producer = Producer(
        client_settings(kafka_cluster, acks="all", delivery_timeout_ms=int(1000 * PATIENCE_S))
    )
    values = [str(number) for number in range(20)]
    assert send(producer, topic, values[:10]) == ["acknowledged"] * 10
    kafka_cluster.kill(leader)
    try:
        assert send(producer, topic, values[10:]) == ["acknowledged"] * 10
        assert read_to_the_end(kafka_cluster, topic) == values
    finally:
        kafka_cluster.restart(leader)
    assert sorted(admin.list_topics(topic, PATIENCE_S).topics[topic].partitions[0].isrs) == [0, 1, 2]


def test_two_of_three_brokers_down_acknowledge_nothing(kafka_cluster: KafkaCluster) -> None:
    topic = new_topic(kafka_cluster)
    producer = Producer(client_settings(kafka_cluster, acks="all", enable_idempotence="true"))
    assert send(producer, topic, ["before"]) == ["acknowledged"]
    try:
        for broker in (0, 1):
            kafka_cluster.kill(broker)
        assert send(producer, topic, ["during"], within_s=AWAY_S) == []
    finally:
        kafka_cluster.restart_all()
    assert producer.flush(PATIENCE_S) == 0
    assert read_to_the_end(kafka_cluster, topic) == ["before", "during"]


@pytest.fixture(scope="module")
def with_login(kafka: KafkaCluster) -> Iterator[KafkaCluster]:
    with KafkaCluster(sasl=("alice", 'pa\\ss: "w/rd"@1')) as cluster:
        yield cluster


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_a_right_password_is_let_in_and_a_wrong_one_refused(with_login: KafkaCluster, mechanism: str) -> None:
    topic = new_topic(with_login)
    settings = {**client_settings(with_login), "sasl.mechanism": mechanism}
    assert send(Producer(settings), topic, ["hello"]) == ["acknowledged"]

    assert refusal({**settings, "sasl.password": "wrong"}) == KafkaError._AUTHENTICATION
    assert read_to_the_end(with_login, topic) == ["hello"]


def test_tls_shows_a_certificate_that_the_client_checks(kafka: KafkaCluster) -> None:
    with KafkaCluster(tls=True) as cluster:
        assert cluster.certificates is not None
        topic = new_topic(cluster)
        with_certificate = {
            **client_settings(cluster),
            "ssl.certificate.location": str(cluster.certificates.client_cert),
            "ssl.key.location": str(cluster.certificates.client_key),
        }
        assert send(Producer(with_certificate), topic, ["hello"]) == ["acknowledged"]
        assert read_to_the_end(cluster, topic) == ["hello"]

        distrusting = client_settings(cluster)
        del distrusting["ssl.ca.location"]
        assert refusal(distrusting) == KafkaError._SSL


def test_clients_go_through_the_addresses_that_brokers_advertise(kafka: KafkaCluster, tmp_path: Path) -> None:
    cluster = KafkaCluster(data_folder=tmp_path)
    with closing(TcpProxy(cluster.addresses[0])) as proxy:
        cluster.advertise([proxy.address])
        assert cluster.url("orders") == f"kafka://{proxy.address}/orders"
        with cluster:
            topic = new_topic(cluster)
            producer = Producer(client_settings(cluster))
            assert send(producer, topic, ["before"]) == ["acknowledged"]
            proxy.cut()
            assert send(producer, topic, ["during"], within_s=AWAY_S) == []
            proxy.heal()
            assert producer.flush(PATIENCE_S) == 0


def test_what_a_test_sets_replaces_the_default(kafka: KafkaCluster, tmp_path: Path) -> None:
    with KafkaCluster(data_folder=tmp_path, settings={"auto.create.topics.enable": "true"}) as cluster:
        assert send(Producer(client_settings(cluster)), "made-by-need", ["hello"]) == ["acknowledged"]
    waiting_for_no_topic = client_settings(kafka, topic_metadata_propagation_max_ms=0)
    assert send(Producer(waiting_for_no_topic), "not-made", ["hello"]) == ["UNKNOWN_TOPIC_OR_PART"]


@pytest.mark.parametrize(
    ("setting", "says"),
    [("log.segment.bytes", "log.segment.bytes"), ("node.id", "node.id")],
    ids=["the broker", "the preparation of its storage"],
)
def test_a_broker_that_does_not_start_shows_the_end_of_its_log(
    kafka: KafkaCluster, tmp_path: Path, setting: str, says: str
) -> None:
    cluster = KafkaCluster(data_folder=tmp_path, settings={setting: "-7"})
    with pytest.raises(KafkaFailed, match=rf"kafka broker 0 [\s\S]*the end of [\s\S]*{says}"):
        cluster.start()


def test_the_own_folder_of_a_cluster_goes_with_it(kafka: KafkaCluster) -> None:
    with KafkaCluster() as cluster:
        folder = cluster.data_folder
        assert cluster.log(0).is_file()
    assert not folder.exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_broker_ends_with_its_parent(kafka: KafkaCluster, tmp_path: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        broker = int(parent.stdout.readline())
        assert is_alive(broker)
        parent.send_signal(how)
        parent.wait(PATIENCE_S)
    wait_until(lambda: not is_alive(broker))


def test_a_command_runs_a_broker_until_it_is_ended(kafka: KafkaCluster) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "rebalanser.testing.kafka_server", "--run", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == f"Kafka serves at 127.0.0.1:{port}; Ctrl-C stops it\n"
        broker = AdminClient({"bootstrap.servers": f"127.0.0.1:{port}"})
        assert broker.list_topics(timeout=PATIENCE_S).brokers
        second = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)
        assert second.returncode == 1
        assert "Address already in use" in second.stderr
        running.terminate()
        assert running.wait(PATIENCE_S) == 0


def test_the_jars_and_the_java_that_run_are_found(kafka: KafkaCluster) -> None:
    libs = find_kafka()
    assert libs is not None
    assert list(libs.glob("kafka_2.13-*.jar"))
    assert find_java() is not None


def commands(folder: Path, **scripts: str) -> str:
    """A folder for the PATH with just these commands, and what a shell script needs."""
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(script)
        (folder / name).chmod(stat.S_IRWXU)
    return f"{folder}:/bin"


def installing(cache: Path, path: str, **environment: str) -> subprocess.CompletedProcess[str]:
    everything = {
        "PATH": path,
        "REBALANSER_CACHE": str(cache),
        "CALLS": str(cache.parent / "calls"),
        "PYTHONPATH": os.pathsep.join([str(cache.parent / "modules"), *sys.path]),
        **environment,
    }
    command = [sys.executable, "-m", "rebalanser.testing.kafka_server"]
    return subprocess.run(command, env=everything, capture_output=True, text=True, check=False)


def test_two_that_install_at_once_download_once_and_see_the_whole(tmp_path: Path) -> None:
    path = commands(tmp_path / "bin", java=FAKE_JAVA, mvn=SLOW_MAVEN)
    with ThreadPoolExecutor() as pool:
        asked = list(pool.map(lambda _: installing(tmp_path / "cache", path), range(2)))
    libs = tmp_path / "cache" / f"kafka-{VERSION}" / "libs"
    assert [(each.returncode, each.stdout, each.stderr) for each in asked] == [(0, f"{libs}\n", "")] * 2
    assert (tmp_path / "calls").read_text() == "called\n"
    assert sorted(jar.name for jar in libs.iterdir()) == ["kafka-clients-4.3.1.jar", "kafka_2.13-4.3.1.jar"]
    assert sorted(entry.name for entry in libs.parent.parent.iterdir()) == [f"kafka-{VERSION}", "kafka.lock"]


def test_a_download_that_breaks_off_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = installing(tmp_path / "cache", commands(tmp_path / "bad", java=FAKE_JAVA, mvn=FAILING_MAVEN))
    assert broken.returncode == 1
    assert "Maven: [ERROR] Could not resolve dependencies\n" in broken.stderr
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["kafka.lock"]
    again = installing(tmp_path / "cache", commands(tmp_path / "good", java=FAKE_JAVA, mvn=SLOW_MAVEN))
    assert again.returncode == 0


@pytest.mark.parametrize(
    ("image", "status", "says"),
    [
        ("example/kafka", 0, "kafka-3.9.1/libs\n"),
        ("example/other", 1, "container: no such image: example/other\n"),
    ],
    ids=["there", "not there"],
)
def test_the_jars_of_a_container_image_are_used_where_there_is_no_maven(
    tmp_path: Path, image: str, status: int, says: str
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "docker.py").write_text(FAKE_DOCKER)
    path = commands(tmp_path / "bin", java=FAKE_JAVA).removesuffix(":/bin")
    asked = installing(tmp_path / "cache", path, KAFKA_IMAGE=image)
    assert asked.returncode == status
    assert (asked.stdout + asked.stderr).endswith(says)


def test_without_any_source_there_is_a_hint_and_a_reason_for_each(tmp_path: Path) -> None:
    asked = installing(tmp_path, commands(tmp_path / "bin", java=FAKE_JAVA).removesuffix(":/bin"))
    assert (asked.returncode, asked.stdout) == (1, "")
    hint, *reasons = asked.stderr.splitlines()
    assert "set KAFKA=HOST:PORT" in hint
    assert [reason.partition(":")[0] for reason in reasons] == ["Maven", "container"]


@pytest.mark.parametrize("java", [None, FAKE_JAVA.replace("17.0.1", "11.0.20")], ids=["none", "too old"])
def test_without_a_java_that_is_new_enough_there_is_a_hint(tmp_path: Path, java: str | None) -> None:
    scripts = {} if java is None else {"java": java}
    asked = installing(tmp_path, commands(tmp_path / "bin", **scripts).removesuffix(":/bin"))
    assert (asked.returncode, asked.stdout) == (1, "")
    hint, *reasons = asked.stderr.splitlines()
    assert "Java >= 17" in hint
    assert [reason.partition(":")[0] for reason in reasons] == ["Java"]


def test_running_brokers_are_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA", "127.0.0.1:9092, 127.0.0.1:19092")
    assert addresses_from_environment() == ("127.0.0.1:9092", "127.0.0.1:19092")
    monkeypatch.delenv("KAFKA")
    assert addresses_from_environment() == ()
