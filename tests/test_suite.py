"""The suite itself: no test reaches the network."""

import socket

import pytest

OUTSIDE = "192.0.2.1"  # an address for documentation: no machine has it


@pytest.mark.parametrize("call", [
    lambda: socket.create_connection((OUTSIDE, 80), timeout=1),
    lambda: socket.create_connection(("example.org", 80), timeout=1),
    lambda: socket.gethostbyname("example.org"),
    lambda: socket.socket(socket.AF_INET6).connect_ex(("2001:db8::1", 80)),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"", (OUTSIDE, 53)),
], ids=["address", "name", "look-up", "version 6", "datagram"])
def test_a_test_that_calls_outside_fails_even_where_it_would_catch_what_goes_wrong(call):
    with pytest.raises(pytest.fail.Exception, match="no network"):
        try:
            call()
        except Exception:  # noqa: BLE001, S110 (as a client does that goes on without the network)
            pass


def test_this_machine_may_be_called():
    with socket.create_server(("127.0.0.1", 0)) as server:
        for host in ("127.0.0.1", "localhost"):
            socket.create_connection((host, server.getsockname()[1]), timeout=5).close()
    left, right = socket.socketpair()
    left.sendall(b"1")
    assert right.recv(1) == b"1"
