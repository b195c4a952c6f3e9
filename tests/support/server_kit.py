"""A real server on a free port, in a thread: real sockets, a real engine's process."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from vllm_metal_lite import EngineConfig
from vllm_metal_lite.server.app import make_app
from vllm_metal_lite.server.models import Models, ModelSpec
from vllm_metal_lite.server.server import Server
from vllm_metal_lite.server.settings import ServerConfig
from vllm_metal_lite.server.worker.client import EngineClient

SMALL = EngineConfig(num_blocks=256, max_num_seqs=8, max_num_batched_tokens=512)


async def start_engine(name: str = "demo", config: EngineConfig = SMALL) -> EngineClient:
    """An engine in a process of its own."""

    async def configure(weight_bytes: int) -> EngineConfig:
        return config

    return await EngineClient.start(name, configure)


@dataclass
class Running:
    """url: without a slash at the end.  server: its state, to look at only."""

    url: str
    server: Server
    loop: asyncio.AbstractEventLoop


@contextmanager
def serving(
    specs: list[ModelSpec] | None = None,
    engine: EngineConfig = SMALL,
    config: ServerConfig | None = None,
) -> Iterator[Running]:
    """A server that is up, by default with the demo model."""
    specs = specs or [ModelSpec("demo", "demo")]
    config = config or ServerConfig(port=0)
    up, running, errors = threading.Event(), [], []

    async def main() -> None:
        models = Models(specs, engine)
        await models.start()
        try:
            server = Server(config, models)
            options = uvicorn.Config(
                make_app(server), host=config.host, port=config.port, log_level="warning"
            )
            http = uvicorn.Server(options)
            serve = asyncio.ensure_future(http.serve())
            while not http.started and not serve.done():
                await asyncio.sleep(0.01)
            host, port = http.servers[0].sockets[0].getsockname()[:2]
            running.append(
                (Running(f"http://{host}:{port}", server, asyncio.get_running_loop()), http)
            )
            up.set()
            await serve
        finally:
            await models.stop()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as e:
            errors.append(e)
        finally:
            up.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert up.wait(120), "the server does not start"
    if errors:
        raise errors[0]
    try:
        yield running[0][0]
    finally:
        running[0][1].should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the server does not stop"
