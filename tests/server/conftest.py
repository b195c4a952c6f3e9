"""Fixtures of the server's tests.  A module may have a `running` of its own."""

import multiprocessing
from types import SimpleNamespace

import httpx
import openai
import pytest

from tests.support.server.kit import OPTIONS, serving
from tests.support.server.scripted import scripted
from vllm_metal_lite import LLM
from vllm_metal_lite.server.worker import link


@pytest.fixture(scope="session", autouse=True)
def engines_are_forks():
    """Engines' processes are forks of one that has imported what all import, for two seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm_metal_lite.server.worker.process"])
    with pytest.MonkeyPatch.context() as patch:
        forks = SimpleNamespace(get_context=lambda method: context)
        patch.setattr(link, "multiprocessing", forks)
        yield


@pytest.fixture(scope="module")
def running(request):
    """A server, by default with the demo model.  SERVING of the module: arguments of `serving`."""
    with serving(**getattr(request.module, "SERVING", {})) as running:
        yield running


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", **OPTIONS) as client:
        yield client


@pytest.fixture(scope="module")
def http(running):
    with httpx.Client(base_url=running.url, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def llm():
    """The embedded engine, as the server has it."""
    return LLM("demo", num_blocks=256, max_num_seqs=8, max_num_batched_tokens=512)


@pytest.fixture(scope="module")
def script():
    """The script of a server whose answers are prepared."""
    with scripted() as script:
        yield script
