"""How an engine's process starts and ends."""

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.support.server.cli_kit import SAFETY
from tests.support.server.command import eventually, is_alive
from tests.support.server.kit import SMALL, start_engine
from vllm_metal_lite import EngineConfig, SamplingParams
from vllm_metal_lite.errors import ModelLoadError
from vllm_metal_lite.server.worker import link
from vllm_metal_lite.server.worker.client import EngineClient
from vllm_metal_lite.server.worker.messages import Add, EngineLost

pytestmark = pytest.mark.long

FOREVER = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)

# Starts an engine and says its id; then the server does nothing more.
SERVER = """
import asyncio, sys
from vllm_metal_lite import EngineConfig, SamplingParams
from vllm_metal_lite.server.worker.client import EngineClient
from vllm_metal_lite.server.worker.messages import Add
from vllm_metal_lite.server.worker.request_state import news_of

async def configure(weight_bytes):
    return EngineConfig(num_blocks=256)

async def main():
    if sys.argv[1] == "loading":
        client = EngineClient("demo", None, str)
        client._link.send(await configure(0))
        print(client.pid, flush=True)
    else:
        client = await EngineClient.start("demo", configure, None)
        params = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)
        async with client.generate(Add("a", [1, 2, 3], params)) as request:
            async for _ in news_of([request]):
                print(client.pid, flush=True)
                break
    await asyncio.sleep(60)

asyncio.run(main())
"""


def no_threads() -> bool:
    """No thread of any client continues; they end a moment after the engine."""
    return not [t for t in threading.enumerate() if t.name.startswith(("to ", "from "))]


@pytest.mark.parametrize("moment", ["loading", "running"])
def test_an_engine_ends_with_its_server(moment):
    command = [sys.executable, "-c", SERVER, moment]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        pid = int(server.stdout.readline())
        assert is_alive(pid)
        server.kill()
    eventually(lambda: not is_alive(pid))


async def test_starts_and_stops_leak_nothing(monkeypatch):
    """Also while steps run, whose requests fail."""
    monkeypatch.setattr(link, "STOP_SECONDS", SAFETY)  # a slow machine kills nothing

    async def once() -> None:
        client = await start_engine()

        async def ask() -> None:
            async with client.generate(Add("a", [1, 2, 3], FOREVER)) as request:
                streaming.set()
                await request.complete()

        streaming = asyncio.Event()
        asking = asyncio.ensure_future(ask())
        await streaming.wait()
        await client.stop()
        with pytest.raises(EngineLost, match="has ended with exit code 0"):
            await asking
        with pytest.raises(EngineLost):
            async with client.generate(Add("b", [1], FOREVER)):
                pass
        assert not is_alive(client.pid)
        await client.stop()  # twice does no harm

    await once()  # Python's own helper process starts with the first
    eventually(no_threads)
    before = len(os.listdir("/dev/fd"))
    await once()
    await once()
    eventually(no_threads)
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("demo", EngineConfig(max_model_len=10**9), "max_model_len must be at most"),
        ("demo", EngineConfig(num_blocks=10**9), "num_blocks=1000000000 needs .* this device has"),
        ("/no/such/model", SMALL, "no such folder"),
        ("unknown", SMALL, None),
        ("unreadable", SMALL, r"config\.json"),
    ],
)
async def test_a_start_that_fails_says_why_in_one_line_and_leaves_nothing(
    tmp_path, name, config, reason
):
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "nobody_knows"}')
    (tmp_path / "unreadable" / "config.json").mkdir(parents=True)
    path = name if name == "demo" else str(tmp_path / name)
    with pytest.raises(ModelLoadError, match=reason) as failure:
        await start_engine(path, config)
    assert "\n" not in str(failure.value)
    eventually(no_threads)


async def test_a_start_may_be_cancelled_or_its_process_killed():
    client = EngineClient("demo", None, str)
    starting = asyncio.ensure_future(start_engine())
    await asyncio.sleep(0.2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match="has ended by SIGKILL"):
        await client._facts
    assert not is_alive(client.pid)
    eventually(no_threads)
