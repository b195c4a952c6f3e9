"""A real server on a free port, in a thread: real sockets, a real engine's process."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm_metal_lite import EngineConfig
from vllm_metal_lite.server.lifecycle import Stopping, listen, serve
from vllm_metal_lite.server.model_text import ModelText
from vllm_metal_lite.server.models import Models
from vllm_metal_lite.server.served_model import ModelSpec
from vllm_metal_lite.server.server import Server
from vllm_metal_lite.server.settings import ServerConfig
from vllm_metal_lite.server.worker.client import EngineClient

# Of official clients.  Every reply is checked against the client's own schema; an error is shown,
# not repeated.
OPTIONS = {"api_key": "x", "_strict_response_validation": True, "max_retries": 0, "timeout": 600}
SMALL = EngineConfig(num_blocks=256, max_num_seqs=8, max_num_batched_tokens=512)


def user(content: Any) -> dict[str, Any]:
    """A message."""
    return {"role": "user", "content": content}


def model_text(tokenizer: Any, name: str = "demo") -> ModelText:
    """A model that has a tokenizer alone."""
    facts = {"uses_checkpoints": False, "max_model_len": 1 << 16}
    return ModelText(SimpleNamespace(name=name, **facts), tokenizer)


async def start_engine(name: str = "demo", config: EngineConfig = SMALL) -> EngineClient:
    """An engine in a process of its own."""

    async def configure(weight_bytes: int) -> EngineConfig:
        return config

    return await EngineClient.start(name, configure, None)


@dataclass
class Running:
    """url: without a slash at the end.  server: its state, to look at only."""

    url: str
    server: Server
    loop: asyncio.AbstractEventLoop

    @property
    def model(self) -> ModelText:
        """The text side of the first model, which is loaded."""
        return next(iter(self.server.models.loaded.values())).model


@contextmanager
def serving(
    specs: list[ModelSpec] | None = None,
    engine: EngineConfig = SMALL,
    config: ServerConfig | None = None,
) -> Iterator[Running]:
    """A server that is up, by default with the demo model."""
    specs = specs or [ModelSpec("demo", "demo")]
    config = config or ServerConfig(port=0)
    up, ready, errors = threading.Event(), [], []

    async def main() -> None:
        stopping = Stopping()

        def on_ready(server: Server, url: str) -> None:
            loop = asyncio.get_running_loop()
            ready.append((Running(url, server, loop), stopping))
            up.set()

        models = Models(specs, engine, config)
        await serve(listen(config), config, models, stopping, on_ready)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as e:
            errors.append(e)
        finally:
            up.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert up.wait(600), "the server does not start"
    if errors:
        raise errors[0]
    running, stopping = ready[0]
    try:
        yield running
    finally:
        running.loop.call_soon_threadsafe(stopping.ask)
        running.loop.call_soon_threadsafe(stopping.ask)
        thread.join(600)
        assert not thread.is_alive(), "the server does not stop"
