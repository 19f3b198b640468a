"""Leads all that a sandbox sends to sockets that the gate has, without a firewall.

A sandbox has a network namespace with nothing but a loopback interface. Here every address in the
world is declared to be local to it, so that a connection to any address ends at a listener inside
the namespace, or is refused by the kernel where none listens. The listeners are opened inside and
used outside: a socket stays in the namespace that it was made in. Which listener a connection came
through therefore says which sandbox it is of, and the address that was asked for is the
connection's own.
"""

import errno
import fcntl
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from c2.sandbox import linux
from c2.sandbox.egress import packets
from c2.sandbox.egress.policy import NAMES_PORT
from c2.sandbox.protocol import SandboxError

T = TypeVar("T")
BACKLOG = 128
READY_S = 5.0
SIOCGIFFLAGS, IFF_UP, RTMGRP_LINK = 0x8913, 1, 1
IP_PKTINFO = 8
NLMSG_ERROR, RTM_NEWROUTE = 2, 24
NLM_F_REQUEST, NLM_F_ACK, NLM_F_EXCL, NLM_F_CREATE = 0x1, 0x4, 0x200, 0x400
RT_TABLE_LOCAL, RTPROT_STATIC, RT_SCOPE_HOST, RTN_LOCAL, RTA_OIF = 255, 4, 254, 2, 4
LOOPBACK = 1  # its number in every namespace


def open_sockets(process: int, ports: Iterable[int]) -> list[socket.socket]:
    """Prepares the namespace of a process and opens all sockets of a gate in it.

    Args:
      process: descriptor of the process.
      ports: those of the policy.

    Returns:
      Three for names over UDP, for names over TCP and for stray packets; then one for each port.

    Raises:
      SandboxError: if the kernel refuses something.
    """
    return _inside(process, lambda: _prepare(process, list(ports)))


def open_listeners(process: int, ports: Iterable[int]) -> list[socket.socket]:
    """More listeners in a namespace that has been prepared; raises SandboxError."""
    return _inside(process, lambda: _all(_listener, list(ports)))


def _prepare(process: int, ports: list[int]) -> list[socket.socket]:
    _await_loopback(process)
    make_local(socket.AF_INET)
    if os.path.exists("/proc/thread-self/net/if_inet6"):
        make_local(socket.AF_INET6)  # no one listens there, but then attempts are seen
    made = [_names(), *_all(_listener, [NAMES_PORT]), packets.stray()]
    return made + _all(_listener, ports)


def _await_loopback(process: int) -> None:
    """Waits until whoever made the namespace has set it up; two at a time get into trouble."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as news:
        news.bind((0, RTMGRP_LINK))
        news.setblocking(False)
        poll = select.poll()
        poll.register(news, select.POLLIN)
        poll.register(process, select.POLLIN)  # it has ended
        while not _is_up():
            if [fd for fd, _ in poll.poll(READY_S * 1000)] != [news.fileno()]:
                raise OSError(errno.ENETDOWN, "the sandbox has not set up its network")
            news.recv(65536)


def _is_up() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, SIOCGIFFLAGS, struct.pack("16sh22x", b"lo", 0))
    return bool(struct.unpack_from("16xh", answer)[0] & IFF_UP)


def make_local(family: int) -> None:
    """Makes every address of a family local to the namespace of the calling thread."""
    route = struct.pack(
        "=BBBBBBBBI", family, 0, 0, 0, RT_TABLE_LOCAL, RTPROT_STATIC, RT_SCOPE_HOST, RTN_LOCAL, 0
    )
    body = route + struct.pack("=HHi", 8, RTA_OIF, LOOPBACK)
    flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_EXCL | NLM_F_CREATE
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.send(struct.pack("=IHHII", 16 + len(body), RTM_NEWROUTE, flags, 1, 0) + body)
        _, kind, _, _, _, error = struct.unpack_from("=IHHIIi", netlink.recv(4096))
    if kind != NLMSG_ERROR or error:
        raise OSError(-error, f"no route: {os.strerror(-error)}")


def _names() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)  # to answer from the address that was asked
    sock.bind(("", NAMES_PORT))
    return sock


def _listener(port: int) -> socket.socket:
    try:
        return socket.create_server(("", port), backlog=BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno)
        raise OSError(error.errno, f"the gate cannot listen at port {port}: {reason}") from error


def _all(make: Callable[[int], socket.socket], ports: list[int]) -> list[socket.socket]:
    made: list[socket.socket] = []
    try:
        for port in ports:
            made.append(make(port))
    except OSError:
        for sock in made:
            sock.close()
        raise
    return made


def _inside(process: int, call: Callable[[], T]) -> T:
    """Calls in the network namespace of a process, by a thread that never comes back from there.

    A user who is not root may enter what it has made, but not return to the machine's namespace.
    """
    results: list[T] = []
    errors: list[OSError] = []

    def run() -> None:
        try:
            linux.enter(process, linux.CLONE_NEWNET)
            results.append(call())
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="c2-sandbox-network")
    thread.start()
    thread.join()
    if errors:
        raise SandboxError(errors[0].strerror)
    return results[0]
