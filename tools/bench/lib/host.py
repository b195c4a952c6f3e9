"""Work of the host by itself: a step of the engine around a model that costs nothing."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.lib.tables import table_head
from vllm_metal_lite import EngineConfig, LLMEngine, SamplingParams, backend
from vllm_metal_lite.model.loader import load
from vllm_metal_lite.runner.result import StepResult

# isort: split

mx = backend.mx


class _NoModel:
    """In the place of the runner: tokens at no cost, those of a text over and over."""

    def __init__(self, token_ids: list[int]) -> None:
        self._tokens, self._at = np.array(token_ids, np.int32), 0

    def execute(self, batch: Any, req_indices: np.ndarray, *rest: Any) -> StepResult:
        self._at = (self._at + len(req_indices)) % (len(self._tokens) - len(req_indices))
        tokens = self._tokens[self._at : self._at + len(req_indices)]
        return StepResult(req_indices, mx.array(tokens), None, None)


_README = Path(__file__).resolve().parents[3] / "README.md"  # what is said
_TEXTS = ("token ids only", "text that nobody reads", "text", "text and a stop string")
_PARTS = ("schedule", "advance", "update", "pack")


def host(batches: Sequence[int] = (1, 64, 256), steps: int = 400) -> dict[str, dict[str, float]]:
    """Milliseconds of CPU time a step of the engine around a model that costs nothing, all requests
    decoding, and of parts of it; text is the demo model's, read after each step."""
    print(f"\n### Host work, CPU ms a step (median of {steps}; 95th percentile)\n")
    table_head(["requests", *_TEXTS, *(f"in it: {part}" for part in _PARTS)])
    result = {}
    for requests in batches:
        times: dict[str, list[float]] = {}
        for kind in _TEXTS:
            engine = _engine_alone(requests, steps, kind)
            for name in _PARTS:
                owner = engine.inputs if name == "pack" else engine.scheduler
                setattr(owner, name, timed(getattr(owner, name), times.setdefault(name, [])))

            def step(engine: LLMEngine = engine, read: bool = kind in _TEXTS[2:]) -> None:
                for output in engine.step():
                    _ = output.outputs[0].text if read else ""

            timed_step = timed(step, times.setdefault(kind, []))
            for _ in range(steps):
                timed_step()
        ms = {name: 1e3 * np.array(times[name][-steps:]) for name in (*_TEXTS, *_PARTS)}
        result[str(requests)] = {name: float(np.median(t)) for name, t in ms.items()}
        cells = [f"{np.median(t):.3f}; {np.percentile(t, 95):.3f}" for t in ms.values()]
        print(f"| {requests} | " + " | ".join(cells) + " |", flush=True)
    return result


def _engine_alone(requests: int, steps: int, kind: str) -> LLMEngine:
    model = load("demo")
    said = model.tokenizer.encode(_README.read_text(encoding="utf-8")[:6000])
    if kind == _TEXTS[0]:
        model.tokenizer = None
    config = EngineConfig(
        max_num_seqs=requests, num_blocks=requests * 40, max_num_batched_tokens=8192,
        max_model_len=640,
    )  # fmt: skip
    engine = LLMEngine(model, config)
    engine.pipeline.runner = _NoModel(said)
    stop = "\n\n\n" if kind == _TEXTS[3] else None
    params = SamplingParams(temperature=0, max_tokens=steps + 50, ignore_eos=True, stop=stop)
    rng = np.random.default_rng(0)
    for i in range(requests):
        engine.add_request(str(i), rng.integers(32, model.vocab_size, 100).tolist(), params)
    for _ in range(20):
        engine.step()
    return engine


def timed(
    call: Callable, into: list[float], clock: Callable[[], float] = time.thread_time
) -> Callable:
    """A function that also adds the seconds of each call to a list."""

    def timing(*args: Any, **kwargs: Any) -> Any:
        start = clock()
        result = call(*args, **kwargs)
        into.append(clock() - start)
        return result

    return timing
