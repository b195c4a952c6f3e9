"""Fetches pictures that requests name by URL, from hosts that the user allows.

A server reaches hosts that the sender of a request cannot reach, such as those of its own network.
So it connects to public addresses alone.  A name is resolved once, and the connection goes to the
address that was checked: a second answer of a hostile name server has no effect.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv6Network, ip_address
from ssl import SSLContext
from typing import Any

import httpx2

from vllm_metal_lite.errors import one_line, show
from vllm_metal_lite.server.errors import bad
from vllm_metal_lite.server.offload import offload

MAX_REDIRECTS = 5
# The limits of one request.  No connection is used twice: other names may have its address.
_LIMITS = httpx2.Limits(max_connections=8, max_keepalive_connections=0)
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "vllm-metal-lite"}
_NAT64 = IPv6Network("64:ff9b::/96")  # its last 32 bits are an IPv4 address
_PORTS = {"http": 80, "https": 443}


def is_public(address: str) -> bool:
    """Whether an IP address belongs to one host of the public Internet."""
    ip: Any = ip_address(address)
    if ip.version == 6:
        if ip.is_site_local:
            return False
        inner = ip_address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else ip.ipv4_mapped or ip.sixtofour
        ip = inner or ip
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


@dataclass(frozen=True)
class Media:
    """domains: hosts that files may come from, as in vLLM's allowed_media_domains; "*": any.
    max_bytes, seconds: the limits of all files of a request together.
    allows: whether the server may connect to an IP address.
    """

    domains: Sequence[str] = ()
    max_bytes: int = 1 << 25
    seconds: float = 10.0
    allows: Callable[[str], bool] = is_public

    async def fetch(self, places: Mapping[str, str]) -> dict[str, bytes]:
        """The files by their URLs.  places: where each URL is in the body.

        Raises ApiError (400) with the place of a URL that cannot be fetched.
        """
        tls, files = await offload(_tls), {url: bytearray() for url in places}

        async def load(url: str, where: str) -> None:
            try:
                async with (
                    asyncio.timeout(self.seconds),
                    aclosing(self._parts(client, url)) as parts,
                ):
                    async for part in parts:
                        files[url] += part
                        if sum(map(len, files.values())) > self.max_bytes:
                            most = f"{self.max_bytes:,} bytes"
                            raise ValueError(f"a request's pictures may have {most} together")
            except TimeoutError:
                why = f"it has not come within {self.seconds:g} seconds"
            except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as e:
                why = one_line(e)
            else:
                return
            raise bad(where, f": {show(url[:80])} cannot be fetched: {why}")

        # The user's proxies would connect to any address.
        how: dict[str, Any] = {"verify": tls, "trust_env": False, "timeout": None}
        async with httpx2.AsyncClient(limits=_LIMITS, headers=_HEADERS, **how) as client:
            try:
                async with asyncio.TaskGroup() as loads:
                    for url, where in places.items():
                        loads.create_task(load(url, where))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return {url: bytes(file) for url, file in files.items()}

    async def _parts(self, client: httpx2.AsyncClient, source: str) -> AsyncGenerator[bytes]:
        """The bytes of a file as they come, after redirects."""
        url = httpx2.URL(source)
        for _ in range(MAX_REDIRECTS + 1):
            address = await self._address(url)
            # The certificate names the host, not the address.
            host, name = url.netloc.decode(), {"sni_hostname": url.raw_host.decode()}
            pinned = url.copy_with(host=address)
            request = client.build_request("GET", pinned, headers={"Host": host}, extensions=name)
            reply = await client.send(request, stream=True)
            try:
                if reply.has_redirect_location:
                    url = url.join(reply.headers["Location"])
                    continue
                if reply.status_code != 200:
                    raise ValueError(f"the status is {reply.status_code}")
                async for part in reply.aiter_raw():
                    yield part
                return
            finally:
                await reply.aclose()
        raise ValueError(f"it has more than {MAX_REDIRECTS} redirects")

    async def _address(self, url: httpx2.URL) -> str:
        """The address to connect to."""
        shown = show(url.host[:80])
        if url.scheme not in _PORTS:
            raise ValueError(f"{show(url.scheme[:80])} is not http or https")
        if url.host not in self.domains and "*" not in self.domains:
            raise ValueError(f"the host {shown} is not in allowed_media_domains")
        loop, port = asyncio.get_running_loop(), url.port or _PORTS[url.scheme]
        resolved = await loop.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
        addresses = [str(where[0]) for *_, where in resolved]
        if not all(map(self.allows, addresses)):
            raise ValueError(f"the host {shown} has an address that is not public")
        return addresses[0]


@cache
def _tls() -> SSLContext:
    """Reads the machine's certificates, once."""
    return httpx2.create_ssl_context(trust_env=False)
