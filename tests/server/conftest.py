"""Fixtures of the server's tests.  A module may have a `running` of its own."""

import httpx
import openai
import pytest

from tests.support.scripted_answers import scripted
from tests.support.server_kit import OPTIONS, serving
from vllm_metal_lite import LLM


@pytest.fixture(scope="module")
def running():
    """A server with the demo model."""
    with serving() as running:
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
