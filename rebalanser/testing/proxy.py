"""A TCP proxy whose network can be cut, stalled and slowed: how tests make a network fail."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType


_TURNS = 8
"""From being accepted to having a flow a connection takes fewer turns of the loop."""


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
        self._server: asyncio.Server | None = None
        self._port = 0
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-to-{target}", daemon=True)
        self._thread.start()
        self._call(self._listen())

    @property
    def address(self) -> str:
        """``127.0.0.1:PORT``, the same through every cut and heal."""
        return f"127.0.0.1:{self._port}"

    def cut(self) -> None:
        """Drop all connections and refuse new ones."""
        self._call(self._cut())

    def stall(self) -> None:
        """Keep connections open, accept new ones, and forward nothing: a half-open network."""
        self._call(self._stall())

    def heal(self) -> None:
        """Forward again; what was sent during a stall arrives now, a little late."""
        self._call(self._heal())

    def close(self) -> None:
        """Drop everything and end the thread. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        self._call(self._end())
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
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def _cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for flow in self._flows:
            flow.cancel()
        await asyncio.gather(*self._flows, return_exceptions=True)

    async def _end(self) -> None:
        """Drop everything, also what was being accepted, and let the loop close what was dropped."""
        for _ in range(_TURNS):
            await self._cut()
            await asyncio.sleep(0)

    async def _stall(self) -> None:
        self._flowing.clear()

    async def _heal(self) -> None:
        self._flowing.set()
        if self._server is None:
            await self._listen()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        flow = asyncio.current_task()
        if flow is None:
            return
        self._flows.add(flow)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._join(reader, writer)
        self._flows.discard(flow)
        writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flowing.wait()
        from_target, to_target = await asyncio.open_connection(*self._target)
        try:
            with contextlib.suppress(ExceptionGroup):
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pump(reader, to_target))
                    both.create_task(self._pump(from_target, writer))
        finally:
            to_target.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while piece := await source.read(65536):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            await self._flowing.wait()
            sink.write(piece)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()
