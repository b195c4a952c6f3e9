"""The rooms on top of the core can be taken away: what is left generates the same tokens."""

import json
import os
import shutil
from functools import cache
from pathlib import Path

import pytest

from tests.support.run_python import run_python
from vllm_metal_lite import LLM, SamplingParams

ROOT = Path(__file__).parent.parent
ROOMS = ("benchmark.py", "checks", "cli", "fusion", "images", "prefix_disk", "server")
ROOMS += ("structured_outputs", "vllm_plugin")
PROMPTS = ["The colour of the door is red. The colour of the door is", "sort: 3 1 2 ->"]
OPTIONS = {"num_blocks": 16, "max_num_seqs": 2, "max_model_len": 128}
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}

SCRIPT = """
import json, sys
from contextlib import nullcontext
import vllm_metal_lite
from metal.host import installed
from vllm_metal_lite import LLM, SamplingParams

prompts, options, params, *paths = json.loads(sys.argv[1])
done = {"file": vllm_metal_lite.__file__}
for attention in paths:
    with installed() if attention == "kernels" else nullcontext():
        llm = LLM("demo", attention=attention, **options)
        outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
        assert llm.engine.runner.attention.name == attention
    done[attention] = [output.outputs[0].token_ids for output in outputs]
print(json.dumps(done))
"""


@cache
def expected() -> list[list[int]]:
    """The tokens that the whole package generates."""
    llm = LLM("demo", attention="reference", **OPTIONS)
    outputs = llm.generate(PROMPTS, SamplingParams(**GREEDY), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.long
@pytest.mark.parametrize("rooms", [*((room,) for room in ROOMS), ROOMS], ids="+".join)
def test_the_core_runs_without(rooms, tmp_path):
    """With kernels too, if the rooms that check and fuse them are both removed."""
    copy = tmp_path / "vllm_metal_lite"
    skipped = shutil.ignore_patterns("__pycache__", "demo_model", *rooms)
    shutil.copytree(ROOT / "vllm_metal_lite", copy, ignore=skipped)
    (copy / "demo_model").symlink_to(ROOT / "vllm_metal_lite" / "demo_model")
    (tmp_path / "metal").symlink_to(ROOT / "metal")
    assert not [room for room in rooms if (copy / room).exists()]
    paths = ["reference"]
    if {"checks", "fusion"} <= set(rooms):
        paths.append("kernels")
    job = json.dumps([PROMPTS, OPTIONS, GREEDY, *paths])
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "METAL_LITE_DEVICE": "cpu"}
    run = run_python("-c", SCRIPT, job, cwd=tmp_path, env=env)
    assert run.returncode == 0, run.stderr
    done = json.loads(run.stdout.splitlines()[-1])
    assert Path(done.pop("file")).is_relative_to(tmp_path)
    assert done == {path: expected() for path in paths}
