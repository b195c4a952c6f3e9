"""The work of the host alone: steps of an engine whose model costs nothing.

    python -m tools.bench.host                           half a minute, on a CPU
    python -m tools.bench.host --requests 8 --steps 20   some seconds

Prints Markdown: milliseconds of CPU time a step, the median.  All requests decode; their text is
the README's, by the demo model's tokenizer.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.lib.engines import FittedEngine
from tools.bench.lib.loads import Wave, WaveLoad
from tools.lib.frame import at_least, parser_of, print_table, run_main
from vllm_metal_lite.backend import mx
from vllm_metal_lite.model.loader import load
from vllm_metal_lite.runner.result import StepResult
from vllm_metal_lite.sampling.sampler import SamplerOutput

_README = Path(__file__).resolve().parents[2] / "README.md"
_TEXTS = ("text that nobody reads", "text, read at each step", "and a stop string")
_WARM_UPS = 20  # steps


class NoModel:
    """Replaces the runner: returns the given tokens over and over, at no cost."""

    drafter = None

    def __init__(self, token_ids: list[int]) -> None:
        self._tokens, self._at = np.array(token_ids, np.int32), 0

    def execute(self, batch: Any, *rest: Any) -> StepResult:
        count = len(batch.sample_segments)
        tokens = mx.array(self._tokens.take(range(self._at, self._at + count), mode="wrap"))
        self._at = (self._at + count) % len(self._tokens)
        return StepResult(batch, SamplerOutput(tokens, None, tokens))


def rows(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The rows of the table."""
    model = load("demo")
    said = model.tokenizer.encode(_README.read_text(encoding="utf-8")[:6000])
    rng, count = np.random.default_rng(0), args.requests
    prompts = [rng.integers(32, model.vocab_size, 100).tolist() for _ in range(count)]
    requests = WaveLoad([Wave(prompts, [args.steps + 2 * _WARM_UPS] * count)])
    for text in _TEXTS:
        params = {"stop": "\n\n\n"} if text == _TEXTS[2] else {}
        ours = FittedEngine(model, requests, {"max_num_batched_tokens": 8192}, params=params)
        ours.begin(requests)
        ours.add(0, requests.prompts, requests.max_tokens)
        engine = ours.engine
        engine.in_flight.pipeline.runner = NoModel(said)
        times = []
        for _ in range(args.steps + _WARM_UPS):
            start = time.thread_time()
            for output in engine.step():
                _ = output.outputs[0].text if text != _TEXTS[0] else ""
            times.append(time.thread_time() - start)
        yield text, f"{1e3 * float(np.median(times[_WARM_UPS:])):.2f}"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=at_least(1), default=256)
    parser.add_argument("--steps", type=at_least(1), default=400)
    args = parser.parse_args()
    print_table((f"{args.requests} requests", "CPU ms a step"), rows(args))
    return 0


if __name__ == "__main__":
    run_main(main)
