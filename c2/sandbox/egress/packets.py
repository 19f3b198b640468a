"""Packets that no listener of the gate takes: the kernel refuses them, and here they are seen."""

import ctypes
import socket
import struct
from dataclasses import dataclass

ETH_P_ALL = 3
SO_ATTACH_FILTER = 26
SOL_PACKET, PACKET_STATISTICS = 263, 6
SNAP = 128  # bytes that are kept of a packet
BUFFER = 1 << 16
PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp6"}
# Classic BPF over packets from the network header on: what lo delivers, but for the sandbox's
# traffic with itself (127.0.0.0/8, ::1) and for TCP segments that begin no connection.
DROP, TAKE = "drop", "take"
FILTER = (
    ("start", 0x20, 0xFFFFF000 + 4, None, None),  # type of the packet
    (None, 0x15, 0, None, DROP),  # only what arrives, not what is sent
    (None, 0x30, 0, None, None),  # version
    (None, 0x54, 0xF0, None, None),
    (None, 0x15, 0x40, None, "six"),
    (None, 0x30, 16, None, None),  # first byte of the target
    (None, 0x15, 127, DROP, None),
    (None, 0x30, 9, None, None),  # protocol
    (None, 0x15, 6, None, TAKE),
    (None, 0xB1, 0, None, None),  # length of the header
    (None, 0x50, 13, None, None),  # flags of TCP
    (None, 0x54, 0x12, None, None),  # SYN, ACK
    (None, 0x15, 0x02, TAKE, DROP),
    ("six", 0x20, 24, None, None),  # first and last word of the target
    (None, 0x15, 0, None, "tcp6"),
    (None, 0x20, 36, None, None),
    (None, 0x15, 1, DROP, None),
    ("tcp6", 0x30, 6, None, None),
    (None, 0x15, 6, None, TAKE),
    (None, 0x30, 53, None, None),
    (None, 0x54, 0x12, None, None),
    (None, 0x15, 0x02, TAKE, DROP),
    (DROP, 0x06, 0, None, None),
    (TAKE, 0x06, SNAP, None, None),
)


@dataclass(frozen=True)
class Stray:
    """A packet: its protocol, the address it was for, and the port, if there is one."""

    protocol: str
    address: str
    port: int | None


def stray() -> socket.socket:
    """A socket that receives such packets of the namespace it is made in."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)  # 0: nothing before the filter
    code = b"".join(_instruction(index, *line) for index, line in enumerate(FILTER))
    keep = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(FILTER), ctypes.addressof(keep))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    sock.bind(("lo", ETH_P_ALL))
    return sock


def missed(sock: socket.socket) -> int:
    """How many packets found no room in the socket since this was last asked."""
    return struct.unpack("=II", sock.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))[1]


def parse(packet: bytes) -> Stray | None:
    """What a packet is, beginning with its network header; None for what need not be told.

    That is: errors that the kernel sends back, and what a gate's own name service answers.
    """
    version = packet[0] >> 4 if packet else 0
    if version == 4 and len(packet) >= 20:
        protocol, start = packet[9], 4 * (packet[0] & 15)
        address = socket.inet_ntop(socket.AF_INET, packet[16:20])
    elif version == 6 and len(packet) >= 40:
        protocol, start = packet[6], 40
        address = socket.inet_ntop(socket.AF_INET6, packet[24:40])
    else:
        return None
    body = packet[start:]
    if protocol in (1, 58):
        echo = {1: 8, 58: 128}[protocol]
        return Stray(PROTOCOLS[protocol], address, None) if body[:1] == bytes([echo]) else None
    if protocol not in (6, 17) or len(body) < 4:
        return Stray(PROTOCOLS.get(protocol, f"protocol {protocol}"), address, None)
    source, port = struct.unpack_from("!HH", body)
    if protocol == 17 and 53 in (source, port) and version == 4:
        return None
    return Stray(PROTOCOLS[protocol], address, port)


def _instruction(
    index: int, label: str | None, code: int, value: int, then: str | None, other: str | None
) -> bytes:
    lines = [line[0] for line in FILTER]
    jumps = [0 if to is None else lines.index(to) - index - 1 for to in (then, other)]
    return struct.pack("HBBI", code, *jumps, value)
