"""The name service of a sandbox. No question of a sandbox is ever passed on.

A name that the policy knows gets an address that means nothing; where a connection goes is decided
by the name in it. So nothing can be told to anyone outside by asking for names.
"""

import socket
import struct

import dns.exception
import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from c2.sandbox.egress.log import SandboxLog
from c2.sandbox.egress.namespace import IP_PKTINFO
from c2.sandbox.egress.policy import Policy
from c2.sandbox.egress.trust import ADDRESS

TTL_S = 5  # a policy may change
MAX_QUERY = 4096
PKTINFO = struct.Struct("=I4s4s")


def answer(query: bytes, policy: Policy, log: SandboxLog) -> bytes | None:
    """The answer to a query, or None if it is none."""
    try:
        asked = dns.message.from_wire(query)
    except (dns.exception.DNSException, ValueError) as error:
        log.deny("name", f"not a query: {type(error).__name__}")
        return None
    if asked.flags & dns.flags.QR:  # an answer; two servers could go on for ever
        log.deny("name", "not a query: an answer")
        return None
    reply = dns.message.make_response(asked, recursion_available=True)
    question = asked.question[0] if len(asked.question) == 1 else None
    if asked.opcode() != dns.opcode.QUERY or question is None:
        reply.set_rcode(dns.rcode.NOTIMP)
        log.deny("name", "not an ordinary query")
        return reply.to_wire()
    name = question.name.to_text(omit_final_dot=True).lower()
    kind = dns.rdatatype.to_text(question.rdtype)
    if question.rdclass != dns.rdataclass.IN or not policy.resolves(name):
        reply.set_rcode(dns.rcode.NXDOMAIN)
        log.deny("name", "the policy names no such host", name=name, type=kind)
        return reply.to_wire()
    if question.rdtype == dns.rdatatype.A:
        reply.answer.append(dns.rrset.from_text(question.name, TTL_S, "IN", "A", ADDRESS))
    log.allow("name", name=name, type=kind)
    return reply.to_wire()


def serve_datagrams(sock: socket.socket, policy: Policy, log: SandboxLog, most: int) -> bool:
    """Answers what has come in, from the addresses that were asked; True if more may be there."""
    for _ in range(most):
        try:
            query, ancillary, _, client = sock.recvmsg(MAX_QUERY, 256)
        except BlockingIOError:
            return False
        asked = next((PKTINFO.unpack(data)[1] for _, kind, data in ancillary if kind == IP_PKTINFO))
        if reply := answer(query, policy, log):
            source = PKTINFO.pack(0, asked, bytes(4))
            try:
                sock.sendmsg([reply], [(socket.IPPROTO_IP, IP_PKTINFO, source)], 0, client)
            except OSError as error:
                log.tell("name", error=f"the answer could not be sent: {error.strerror}")
    return True
