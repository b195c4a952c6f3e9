"""An agent whose server is killed and starts again."""

import re
import shutil

import httpx
import pytest

from tests.support.server.cli_kit import SAFETY, model_folder
from tests.support.server.command import eventually, serve_command


@pytest.mark.long
def test_the_first_request_after_a_restart_finds_the_prompt(tmp_path):
    if shutil.disk_usage(tmp_path).free < 5 << 30:
        pytest.skip("prefixes are not written to a disk that is nearly full")
    files = tmp_path / "vllm_metal_lite" / "prefixes.noindex"
    messages = [{"role": "system", "content": "Read, edit, run. " * 150}]
    flags, env = ("--prefix-disk-gib", "1"), {"XDG_CACHE_HOME": str(tmp_path)}
    for questions in ("Look at it", "Go on"), ("Go on again",):
        with (
            serve_command(tmp_path / "err", str(model_folder(context=8192)), *flags, env=env) as it,
            httpx.Client(base_url=it.url(), timeout=SAFETY) as client,
        ):
            for question in questions:
                messages.append({"role": "user", "content": question})
                body = {"messages": messages, "max_tokens": 8}
                usage = client.post("/v1/chat/completions", json=body).json()["usage"]
                messages.append({"role": "assistant", "content": "Done."})
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                eventually(lambda most=cached // 16: len(list(files.glob("??/*"))) >= most)
            metrics = client.get("/metrics").text
    restored = usage["prompt_tokens_details"]["restored_tokens"]
    assert restored == cached >= 0.9 * usage["prompt_tokens"]
    assert re.search(rf"vllm:external_prefix_cache_hits_total{{.*}} {restored}\.0", metrics)
