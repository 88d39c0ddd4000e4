"""A TCP proxy whose network can be cut, stalled and slowed: how tests make a network fail."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any, Self

from rebalanser.testing.servers import free_ports

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType


_PIECE_BYTES = 65536


class TcpProxy:
    """Forwards ``address`` on loopback to ``target`` from a thread of its own, until closed.

    Healthy at first. The methods may be called from any thread, and have taken effect when they return.
    """

    def __init__(self, target: str, delay_s: float = 0.0) -> None:
        """Start forwarding to ``target`` (``HOST:PORT``), each piece ``delay_s`` seconds late."""
        host, _, port = target.rpartition(":")
        self.delay_s = delay_s
        self._target = (host, int(port))
        self._loop = asyncio.new_event_loop()
        self._flows: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._answering = asyncio.Event()
        self._answering.set()
        self._listener: socket.socket | None = None
        (self._port,) = free_ports(1)
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-to-{target}", daemon=True)
        self._thread.start()
        self._call(self._listen())

    @property
    def address(self) -> str:
        """``127.0.0.1:PORT``, the same through every cut and heal."""
        return f"127.0.0.1:{self._port}"

    def redirect(self, target: str) -> None:
        """Forward connections that are made from now on to another ``target`` (``HOST:PORT``)."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))

    def cut(self) -> None:
        """Drop all connections and refuse new ones."""
        self._call(self._cut())

    def stall(self) -> None:
        """Keep connections open, accept new ones, and forward nothing: a half-open network."""
        self._call(self._stall())

    def mute(self) -> None:
        """Forward what the clients send and nothing that is answered: requests take effect unseen."""
        self._call(self._mute())

    def heal(self) -> None:
        """Forward again; what was sent or answered meanwhile arrives now, a little late."""
        self._call(self._heal())

    def close(self) -> None:
        """Drop everything and end the thread. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        self._call(self._cut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self) -> None:
        # Not asyncio's server, which never closes what it accepts in the turn in which it is closed itself.
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept, self._listener)

    async def _cut(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for flow in self._flows:
            flow.cancel()
        await asyncio.gather(*self._flows, return_exceptions=True)

    async def _stall(self) -> None:
        self._flowing.clear()

    async def _mute(self) -> None:
        self._answering.clear()

    async def _heal(self) -> None:
        self._flowing.set()
        self._answering.set()
        if self._listener is None:
            await self._listen()

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except OSError:
            return  # it has gone away again
        flow = self._loop.create_task(self._join(client))
        self._flows.add(flow)

        def ended(flow: asyncio.Task[None]) -> None:
            self._flows.discard(flow)
            client.close()  # here, as a task that is cancelled before its first step runs nothing of its own

        flow.add_done_callback(ended)

    async def _join(self, client: socket.socket) -> None:
        client.setblocking(False)
        await self._flowing.wait()
        with contextlib.suppress(OSError, ExceptionGroup), socket.socket() as target:
            target.setblocking(False)
            await self._loop.sock_connect(target, self._target)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(client, target, (self._flowing,)))
                both.create_task(self._pump(target, client, (self._flowing, self._answering)))

    async def _pump(
        self, source: socket.socket, sink: socket.socket, gates: tuple[asyncio.Event, ...]
    ) -> None:
        while piece := await self._loop.sock_recv(source, _PIECE_BYTES):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            for gate in gates:
                await gate.wait()
            await self._loop.sock_sendall(sink, piece)
        sink.shutdown(socket.SHUT_WR)
