"""The proxy that makes networks fail leaves nothing open itself, whenever it is cut or closed."""

from __future__ import annotations

import contextlib
import gc
import socket
from collections.abc import Iterator

import pytest

from rebalanser.testing.waiting import PATIENCE_S
from support.proxy import TcpProxy


@pytest.fixture
def target() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        yield server


def address_of(target: socket.socket) -> str:
    return f"127.0.0.1:{target.getsockname()[1]}"


def through(proxy: TcpProxy) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def test_what_is_sent_arrives_both_ways_and_so_does_the_end(target: socket.socket) -> None:
    with TcpProxy(address_of(target)) as proxy, through(proxy) as client:
        client.sendall(b"question")
        server, _ = target.accept()
        with server:
            assert server.recv(100) == b"question"
            client.shutdown(socket.SHUT_WR)
            assert server.recv(100) == b""
            server.sendall(b"answer")
            assert client.recv(100) == b"answer"


def test_a_cut_drops_all_connections_and_healing_lets_new_ones_through(target: socket.socket) -> None:
    with TcpProxy(address_of(target)) as proxy:
        with through(proxy) as client:
            client.sendall(b"question")
            server, _ = target.accept()
            with server:
                proxy.cut()
                with contextlib.suppress(ConnectionResetError):
                    assert client.recv(100) == b""
                with pytest.raises(ConnectionRefusedError):
                    through(proxy)
        proxy.heal()
        with through(proxy):
            target.accept()[0].close()


def test_what_connects_while_it_is_cut_or_closed_is_dropped(target: socket.socket) -> None:
    """Connections that nobody closes would be collected, and warned about, in whichever test comes next."""
    for _ in range(20):
        with contextlib.ExitStack() as stack, TcpProxy(address_of(target)) as proxy:
            for _ in range(10):
                stack.enter_context(through(proxy))
            proxy.cut()
            proxy.heal()
            for _ in range(10):
                stack.enter_context(through(proxy))
    gc.collect()
