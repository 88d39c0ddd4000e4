"""Clusters of real servers on loopback: started, killed, paused and restarted one by one."""

from __future__ import annotations

import atexit
import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

import tenacity

from rebalanser.testing.servers import ServerFailed, ServerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType


class ServerCluster(ABC):
    """Servers on loopback, counted from 0, which end with the context or this process."""

    def __init__(self, product: str, noun: str, count: int, data_folder: Path) -> None:
        self.data_folder = data_folder
        self._noun = noun
        self._processes = [
            ServerProcess(f"{product} {noun} {server}", self.log(server)) for server in range(count)
        ]

    @abstractmethod
    def start(self) -> None:
        """Start all servers and wait until they serve."""

    @abstractmethod
    def _start_server(self, server: int) -> None:
        """Start a stopped server on its data."""

    @abstractmethod
    def _wait_serving(self, servers: Sequence[int], /) -> None:
        """Wait until servers that were just started serve."""

    @abstractmethod
    def _failure(self, server: int) -> ServerFailed:
        """Error for a server that does not serve, with the end of its log."""

    def stop(self) -> None:
        """Kill all servers. Their data and logs stay in the data folder. Stopping twice does nothing."""
        atexit.unregister(self.stop)
        for process in self._processes:
            process.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def kill(self, server: int) -> None:
        """End a server with SIGKILL, paused or not. Killing one that does not run does nothing."""
        self._processes[server].kill()

    def pause(self, server: int) -> None:
        """Stop a server's clock and threads (SIGSTOP); its connections stay open and silent."""
        self._processes[server].pause()

    def resume(self, server: int) -> None:
        """Let a paused server go on."""
        self._processes[server].resume()

    def restart(self, server: int) -> None:
        """Kill a server if it runs, start it again on its data, and wait until it serves."""
        self.kill(server)
        self._start_server(server)
        self._wait_serving((server,))

    def restart_all(self) -> None:
        """Kill every server, paused ones too, start them all on their data, and wait until they serve."""
        servers = range(len(self._processes))
        for server in servers:
            self.kill(server)
        for server in servers:
            self._start_server(server)
        self._wait_serving(servers)

    def log(self, server: int) -> Path:
        """The file with everything that the server has printed."""
        return self.data_folder / f"{self._noun}-{server}.log"

    def pid(self, server: int) -> int:
        """The process id of a running server."""
        return self._processes[server].pid

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        """Make the data folder; stop all started servers if something fails in here or this process ends."""
        self.data_folder.mkdir(parents=True, exist_ok=True)
        atexit.register(self.stop)
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def _wait_for(self, server: int, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Wait until a server is ready; raises the error of ``_failure`` if it ends or time runs out."""

        def look() -> bool:
            if not self._processes[server].is_alive:
                raise self._failure(server)
            return is_ready()

        waiting = tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda ready: not ready),
            stop=tenacity.stop_after_delay(timeout_s),
            wait=tenacity.wait_fixed(0.05),
            retry_error_callback=lambda _state: False,
        )
        if not waiting(look):
            raise self._failure(server)
