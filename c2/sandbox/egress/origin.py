"""Connections to servers: the gate looks names up itself, and looks at the addresses it gets."""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Mapping, Sequence

from c2.sandbox.egress.policy import Denied, Failed, Rule

LOOKUP_S, CONNECT_S = 20.0, 10.0
# Outside it are IPv6 addresses that stand for an IPv4 one, for gateways that this machine may have.
IPV6 = ipaddress.ip_network("2000::/3")
# The first two have services of clouds for their own machines; the third is such a gateway.
NOT_PUBLIC = [ipaddress.ip_network(one) for one in ("168.63.129.16", "192.0.0.0/24", "2002::/16")]


def is_public(text: str) -> bool:
    """Whether an address is one of the Internet at large."""
    address = ipaddress.ip_address(text)
    if address.is_multicast or not address.is_global:
        return False
    if any(address in network for network in NOT_PUBLIC):
        return False
    return address.version == 4 or address in IPV6


async def resolve(host: str, rule: Rule, known: Mapping[str, str]) -> list[str]:
    """The addresses of a host, those in `known` first; raises `Failed` if there are none."""
    if host in known:
        return [known[host]]
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(LOOKUP_S):
            answers = await loop.getaddrinfo(
                host, rule.at, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
            )
    except (OSError, UnicodeError) as error:
        raise Failed("the name of the server cannot be resolved") from error
    return [answer[4][0] for answer in answers]


def check(addresses: Sequence[str], rule: Rule) -> None:
    """Raises `Denied` if one of them is not public although the rule does not say so.

    One is enough: whoever mixes addresses wants some of them to be tried.
    """
    if not rule.private and not all(is_public(address) for address in addresses):
        raise Denied("the name leads to an address that is not public")


async def connect(
    host: str, addresses: Sequence[str], rule: Rule, context: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to one of these very addresses, whose server has shown that it is this host.

    Raises:
      Denied: if it is another one.
      Failed: if there is no connection.
    """
    tls = {"ssl": context, "server_hostname": host} if rule.scheme == "https" else {}
    for address in addresses:
        try:
            async with asyncio.timeout(CONNECT_S):
                return await asyncio.open_connection(address, rule.at, **tls)
        except ssl.SSLError as error:
            raise Denied(f"the server cannot be trusted: {error.reason or error}", 502) from error
        except OSError:
            continue
    raise Failed("the server cannot be reached")
