"""Runs a server: binds, loads the models, serves, and stops without cutting answers off."""

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from vllm_metal_lite.errors import ConfigError, Option
from vllm_metal_lite.server.app import make_app
from vllm_metal_lite.server.connection import HttpProtocol
from vllm_metal_lite.server.models import Models
from vllm_metal_lite.server.server import Server
from vllm_metal_lite.server.settings import ServerConfig
from vllm_metal_lite.server.stream import cancel_if
from vllm_metal_lite.server.worker.request_state import ShuttingDown

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 2  # for the last bytes of ended streams


class Stopping:
    """Asks a server to stop: the first call drains, the second ends at once."""

    def __init__(self) -> None:
        self.asked, self.now = asyncio.Event(), False

    def ask(self) -> None:
        self.now = self.asked.is_set()
        self.asked.set()


async def serve(
    bound: socket.socket,
    config: ServerConfig,
    models: Models,
    stopping: Stopping,
    on_ready: Callable[[Server, str], None],
) -> None:
    """Serve until `stopping`.

    bound: the socket from `listen`, which is closed at the end.  on_ready: gets the server and its
    URL.
    Raises ModelLoadError if a model cannot be loaded.
    """
    try:
        try:
            await cancel_if(stopping.asked.wait(), ShuttingDown, models.start())
        except ShuttingDown:
            return
        server = Server(config, models)
        http = _Http(
            uvicorn.Config(
                make_app(server),
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_CLOSE_SECONDS,
            )
        )
        serving = asyncio.ensure_future(http.serve(sockets=[bound]))
        # A full collection holds Python's lock while it visits all objects: 100 ms and more for
        # those of the imports, which are never freed.
        gc.collect()
        gc.freeze()
        on_ready(server, url_of(bound))
        serving.add_done_callback(lambda _: stopping.ask())
        await stopping.asked.wait()
        await _drain(server, stopping)
        http.should_exit = True
        # Requests that wait for a model that is being loaded end now, too.
        await asyncio.gather(serving, models.stop())
    finally:
        bound.close()
        await models.stop()


async def _drain(server: Server, stopping: Stopping) -> None:
    """Wait for the answers under way; then end them."""
    server.draining = True
    seconds = server.config.drain
    if num := server.num_accepted:
        text = f"Stopping: {num} requests may take {seconds:g} s; a second Ctrl-C ends them now"
        logger.info(text, extra={"shown": True})
    end = time.monotonic() + seconds
    while server.num_accepted and not stopping.now and time.monotonic() < end:
        await asyncio.sleep(0.05)
    server.end_all()


def listen(config: ServerConfig) -> socket.socket:
    """A listening socket.  Raises ConfigError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio turns Nagle's delays off only where the socket names its protocol.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((config.host, config.port))
        bound.listen(2048)
    except (OSError, UnicodeError) as e:
        bound.close()
        reason = getattr(e, "strerror", None) or str(e)
        address, why = f"{config.host}:{config.port}", f"): {reason.lower()}"
        parts = f"cannot listen on {address} (", Option("host"), ", ", Option("port"), why
        raise ConfigError(*parts) from None
    return bound


def url_of(bound: socket.socket) -> str:
    """Where this machine reaches a listening socket."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Http(uvicorn.Server):
    """Leaves signals to `stop_on_signals`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def stop_on_signals(stopping: Stopping) -> Iterator[list[int]]:
    """Let SIGINT and SIGTERM ask for a stop; yields the list of signals that came.

    Only the main thread can do this.
    """
    came: list[int] = []
    loop = asyncio.get_running_loop()

    def take(number: int) -> None:
        came.append(number)
        stopping.ask()

    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, take, number)
    try:
        yield came
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
