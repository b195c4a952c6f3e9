"""A request that spoils its steps, over HTTP and in a real engine's process."""

import logging
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.server.kit import serving
from vllm_metal_lite.server.worker import link

ROOT = Path(__file__).resolve().parents[2]
BAD = 200  # tokens of the bad prompt, which is the longest

# In each process that Python starts: a decode behind BAD + 2 tokens fails at its place.
SITE = f"""
import sys
if "--multiprocessing-fork" in sys.orig_argv:
    import os
    from vllm_metal_lite.runner.runner import ModelRunner

    execute, sample = ModelRunner.execute, ModelRunner._sample_and_score
    place = os.environ["TEST_FAULT"]

    def fail(*_):
        raise RuntimeError("the forward\\nfailed")

    def spoiled(runner, batch, *args):
        num_rows = batch.cu_seqlens_q[1:] - batch.cu_seqlens_q[:-1]
        runner.is_bad = bool(((batch.seq_lens > {BAD} + 2) & (num_rows < 8)).any())
        if runner.is_bad and place == "launch":
            fail()
        result = execute(runner, batch, *args)
        if runner.is_bad and place == "after":
            fail()
        if runner.is_bad and place == "wait":
            result.wait = fail
        return result

    def sampled(runner, *args):
        return fail() if runner.is_bad and place == "inside" else sample(runner, *args)

    ModelRunner.execute, ModelRunner._sample_and_score = spoiled, sampled
"""


@pytest.mark.long
@pytest.mark.parametrize("place", ["inside", "wait"])
def test_one_request_ends_alone(tmp_path, monkeypatch, caplog, place):
    (tmp_path / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setenv("TEST_FAULT", place)
    monkeypatch.setattr(link, "multiprocessing", multiprocessing)  # a new process, no fork
    prompts = [[i + 40] * (10 * i + 5) for i in range(6)]  # with their answers, shorter than BAD
    bad = [7] * BAD

    with serving() as server, caplog.at_level(logging.WARNING, "vllm_metal_lite"):

        def ask(prompt: list[int]) -> httpx.Response:
            body = {"model": "demo", "prompt": prompt, "max_tokens": 40, "temperature": 0}
            body |= {"ignore_eos": True}
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=600)

        alone = [ask(prompt).json()["choices"][0]["text"] for prompt in prompts]
        with ThreadPoolExecutor(8) as pool:
            *replies, failed = pool.map(ask, [*prompts, bad])
    assert [reply.json()["choices"][0]["text"] for reply in replies] == alone
    assert failed.status_code == 503
    message = failed.json()["error"]["message"]
    assert message == "a step of the engine failed: the forward failed"
    *suspected, ended = caplog.messages
    assert set(suspected) <= {"a step of the engine failed: the forward failed"}
    assert ended.startswith("a step of the engine failed and ends cmpl-")
    assert ended.endswith(": the forward failed")
