"""Measures the work of the host alone: steps of an engine whose model costs nothing."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.lib.tables import table_head
from vllm_metal_lite import EngineConfig, LLMEngine, SamplingParams
from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.loader import load
from vllm_metal_lite.runner.result import StepResult
from vllm_metal_lite.sampling.sampler import SamplerOutput

_README = Path(__file__).resolve().parents[3] / "README.md"  # the text of all answers
_REQUESTS, _STEPS = 256, 400
_TEXTS = ("text that nobody reads", "text, read at each step", "and a stop string")


class NoModel:
    """Replaces the runner: returns the given tokens over and over, at no cost."""

    def __init__(self, token_ids: list[int]) -> None:
        self._tokens, self._at = np.array(token_ids, np.int32), 0

    def execute(self, batch: Any, *rest: Any) -> StepResult:
        count = len(batch.sample_segments)
        self._at = (self._at + count) % (len(self._tokens) - count)
        tokens = mx.array(self._tokens[self._at : self._at + count])
        return StepResult(batch, SamplerOutput(tokens, None, tokens))


def host() -> dict[str, float]:
    """Milliseconds of CPU time per step of decodes; the text is the demo model's."""
    print(f"\n### Host work of {_REQUESTS} requests, CPU ms a step (median of {_STEPS})\n")
    table_head(_TEXTS)
    found = {}
    for text in _TEXTS:
        engine, times = _engine_alone(text == _TEXTS[2]), []
        for _ in range(_STEPS):
            start = time.thread_time()
            for output in engine.step():
                _ = output.outputs[0].text if text != _TEXTS[0] else ""
            times.append(time.thread_time() - start)
        found[text] = 1e3 * float(np.median(times))
    print("| " + " | ".join(f"{ms:.2f}" for ms in found.values()) + " |", flush=True)
    return found


def _engine_alone(stops: bool) -> LLMEngine:
    model = load("demo")
    said = model.tokenizer.encode(_README.read_text(encoding="utf-8")[:6000])
    sizes = {"num_blocks": _REQUESTS * 40, "max_num_batched_tokens": 8192, "max_model_len": 640}
    config = EngineConfig(max_num_seqs=_REQUESTS, speculate="off", **sizes)
    engine = LLMEngine(model, config)
    engine.pipeline.runner = NoModel(said)
    stop = "\n\n\n" if stops else None
    params = SamplingParams(temperature=0, max_tokens=_STEPS + 50, ignore_eos=True, stop=stop)
    rng = np.random.default_rng(0)
    for i in range(_REQUESTS):
        engine.add_request(str(i), rng.integers(32, model.vocab_size, 100).tolist(), params)
    for _ in range(20):
        engine.step()
    return engine
