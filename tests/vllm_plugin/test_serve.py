"""`vllm serve` with the demo model: chat, streams, a crowd that leaves, a benchmark."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI

from tests.vllm_plugin import kit
from tools.lib.servers import server
from vllm_metal_lite import __version__

pytestmark = pytest.mark.xdist_group("server")  # of one worker: they share a server
VLLM = Path(sys.executable).with_name("vllm")
NUM_BLOCKS = 120


def environment():
    ours = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    return {**os.environ, **ours}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [VLLM, "serve", kit.DEMO_PATH, "--port", "PORT", "--served-model-name", "demo"]
    command += ["--max-model-len", "512", "--num-gpu-blocks-override", str(NUM_BLOCKS)]
    command += ["--max-num-seqs", "16", "--max-num-batched-tokens", "128"]
    how = {"env": environment(), "start_new_session": True}
    with server([str(part) for part in command], log, **how) as (address, pid):
        assert f"vllm-metal-lite {__version__} is active" in log.read_text()
        yield address
        os.kill(pid, signal.SIGINT)  # as Ctrl-C, which does not reach its session


@pytest.fixture(scope="module")
def client(url):
    return OpenAI(base_url=f"{url}/v1", api_key="none")


def metric(url, name):
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    return sum(float(v) for v in re.findall(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE))


def assert_nothing_is_held(url):
    """No request is left, and no block belongs to one."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        held = [metric(url, f"vllm:{name}") for name in names]
        if held == [0, 0, 0]:
            return
        time.sleep(0.1)
    raise AssertionError(f"running, waiting, usage of K/V: {held}")


MESSAGES = [{"role": "user", "content": "My name is Ada. What is my name?"}]


def test_chat_streams_what_it_answers_at_once(client):
    kwargs = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 80}
    kwargs |= {"extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**kwargs, logprobs=True, top_logprobs=2)
    pieces, entries = [], []
    for chunk in client.chat.completions.create(
        **kwargs, stream=True, logprobs=True, top_logprobs=2
    ):
        pieces.append(chunk.choices[0].delta.content or "")
        if chunk.choices[0].logprobs:
            entries += chunk.choices[0].logprobs.content
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 2
    content = whole.choices[0].logprobs.content
    assert [e.token for e in entries] == [e.token for e in content]
    assert all(e.logprob == e.top_logprobs[0].logprob <= 0 for e in content)  # greedy
    assert whole.usage.completion_tokens == len(content)


def test_completions_are_what_mlx_lm_says_alone(client):
    prompt = [5, 6, 7, 300, 301]
    how = {"max_tokens": 20, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    out = client.completions.create(model="demo", prompt=prompt, temperature=0, **how)
    assert out.choices[0].token_ids == kit.alone("demo", prompt, 20)


def test_a_bad_request_is_refused_and_the_server_lives(client):
    with pytest.raises(BadRequestError, match="512"):
        client.completions.create(model="demo", prompt=[5] * 600, max_tokens=2)
    assert client.completions.create(model="demo", prompt="x", max_tokens=2).choices


def test_labels_are_scored(url):
    """By `logprob_token_ids`; the probabilities are of the labels alone."""
    labels = [5, 6, 7]
    body = {"model": "demo", "query": "The goat", "items": [" is", " was"]}
    body |= {"label_token_ids": labels}
    request = urllib.request.Request(
        f"{url}/generative_scoring", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    found = json.load(urllib.request.urlopen(request))["data"]
    assert len(found) == 2, found
    assert all(0 < item["score"] < 1 for item in found), found


async def test_64_clients_that_come_and_go_leave_nothing_behind(url):
    """Half of them hang up in mid-answer; the pool is too small for all."""
    rng = random.Random(0)
    preempted = metric(url, "vllm:num_preemptions_total")

    async def one(client, i):
        prompt = [rng.randrange(2, 2048) for _ in range(rng.randrange(1, 200))]
        hang_up_after = rng.randrange(1, 40) if i % 2 else None
        kwargs = {"model": "demo", "prompt": prompt, "max_tokens": 120, "stream": True}
        kwargs |= {"temperature": rng.choice([0, 1.0]), "logprobs": rng.choice([None, 2])}
        kwargs |= {"extra_body": {"ignore_eos": True}}
        await asyncio.sleep(rng.random())
        count = 0
        stream = await client.completions.create(**kwargs)
        async for _ in stream:
            count += 1
            if hang_up_after is not None and count >= hang_up_after:
                await stream.close()
                return None
        return count

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        counts = await asyncio.gather(*(one(client, i) for i in range(64)))
    assert sum(c is None for c in counts) == 32
    assert all(c is None or c > 0 for c in counts)
    assert metric(url, "vllm:num_preemptions_total") > preempted
    assert_nothing_is_held(url)


@pytest.mark.thorough
def test_bench_serve_completes(url, tmp_path):
    command = [VLLM, "bench", "serve", "--base-url", url, "--model", "demo", "--tokenizer"]
    command += [kit.DEMO_PATH, "--dataset-name", "random", "--random-input-len", "64"]
    command += ["--random-output-len", "16", "--num-prompts", "24", "--ignore-eos", "--save-result"]
    command += ["--result-dir", tmp_path]
    out = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900)
    assert out.returncode == 0, (out.stdout + out.stderr)[-3000:]
    result = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert result["completed"] == 24
    assert result["total_output_tokens"] == 24 * 16
    assert_nothing_is_held(url)
