"""The sockets of a server's connections."""

import asyncio
import socket

from vllm_metal_lite.server import run
from vllm_metal_lite.server.settings import ServerConfig


def test_what_is_sent_goes_out_at_once():
    """Else the second part of a reply waits 40 ms for the client's delayed ACK (Nagle)."""

    async def nodelay_of_a_connection():
        bound = run._bind(ServerConfig(port=0))
        accepted = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(
            lambda reader, writer: accepted.set_result(writer), sock=bound
        )
        _, client = await asyncio.open_connection(*bound.getsockname())
        connection = (await accepted).get_extra_info("socket")
        nodelay = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        client.close()
        server.close()
        return nodelay

    assert asyncio.run(nodelay_of_a_connection())
