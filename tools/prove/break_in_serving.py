"""Break each kernel while serving, and prove that serving continues and no token changed.

Requests arrive in waves.  After the first wave, the text of one kernel no longer compiles, so its
next launch with new types or sizes fails while MLX evaluates the step.  The engine must name the
kernel, replace it, and answer as the reference attention does.  Tiny models have the experts,
latents and recurrent layers.  Engines start without checks, trials and timings, so fusion is not
tried.  Prints a row per kernel; exit status 0 only if all are right.

    python -m tools.prove.break_in_serving          a GPU, or else the CPU host in its place
    METAL_LITE_DEVICE=cpu python -m tools.prove.break_in_serving --kernels kv_write
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from logging.handlers import BufferingHandler
from unittest.mock import patch

import numpy as np
import pytest

from tests.support.kernels.broken_machine import all_kernels, edit
from tests.support.kernels.device import change_device, gpu_or_host
from tests.support.kernels.row import ServingCase
from tests.support.kernels.table import TABLE
from tests.support.models import tiny_models
from tests.support.models.rounding import of_16_bits
from tools.lib.frame import parser_of, print_table, run_main
from tools.lib.trust import trusted
from vllm_metal_lite import EngineConfig, LLMEngine, SamplingParams, backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.fusion import decide
from vllm_metal_lite.kernels import source
from vllm_metal_lite.kernels.registry import REGISTRY
from vllm_metal_lite.model.loader import load
from vllm_metal_lite.model.packed import NO_FUSION

# Prompt lengths.  Each wave makes new instantiations: more requests, and longer ones.
WAVES = ((40, 70), (130, 33, 90), (300, 257, 128, 60))
WAVE_STEPS, NEW_TOKENS = 6, 24
RIGHT = "right"
# Behind this many tokens the prompts of a wave differ.
SHARED = 24
# Contexts are split, and prefixes shared, at the lengths of these prompts.
SHORT = {"min_split_context": 64, "min_split_keys": 32, "min_saved_tokens": 8}
SHORT |= {"min_prefix_split_keys": 32, "prefix_fill": 1024, "max_own_keys": 0}
SHORT |= {"min_keys": 64, "small_scores": 0}


@contextmanager
def broken(name: str, wrong: str) -> Iterator[None]:
    """From now on, the kernel's text does not compile where `wrong` holds."""
    line = f'{source.MARKER}static_assert(!({wrong}), "broken");\n'
    read = edit(name, lambda text: text.replace(source.MARKER, line))
    with patch.object(source, "read", read), ExitStack() as stack:
        for kernel in all_kernels():
            if kernel.name == REGISTRY[name].file:
                stack.enter_context(patch.object(kernel, "_launchers", {}))
        yield


def make_engine(model: str, case: ServingCase, attention: str, products: bool = True) -> LLMEngine:
    """products: kernels compute the products and the experts."""
    sizes = {"num_blocks": 256, "max_num_seqs": 16, "max_model_len": 512}
    how = {"attention": attention, "kv_bits": case.kv_bits, "dtype": case.dtype}
    config = EngineConfig(max_num_batched_tokens=256, **sizes, **how)
    dtype = getattr(mx, case.dtype)
    loaded = tiny_models.packed(case.tiny, dtype) if case.tiny else load(model, config.dtype)
    unfused = patch.object(decide, "decide", lambda *_: NO_FUSION)
    with trusted(case.prefill, products), nullcontext() if case.fused else unfused:
        return LLMEngine(loaded, config)


class Serving:
    """Requests in waves; `run` follows the waves' schedule, up to a number of steps."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine, self.tokens, self.number = engine, {}, 0
        rng, size = np.random.default_rng(0), engine.model.vocab_size
        shared = rng.integers(2, size, SHARED).tolist()
        self.waves = [
            [shared + rng.integers(2, size, n - SHARED).tolist() for n in lengths]
            for lengths in WAVES
        ]

    def run(self, until: int = 10_000) -> dict[str, list[int]]:
        """Tokens of all requests so far."""
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        while self.number < until:
            wave, rest = divmod(self.number, WAVE_STEPS)
            if rest == 0 and wave < len(self.waves):
                for i, prompt in enumerate(self.waves[wave]):
                    self.engine.add_request(f"{wave}.{i}", prompt, params)
            if wave >= len(self.waves) and not self.engine.has_unfinished_requests():
                break
            for output in self.engine.step():
                self.tokens[output.request_id] = list(output.outputs[0].token_ids)
            self.number += 1
        return self.tokens


def expected_tokens(model: str, case: ServingCase) -> list[dict[str, list[int]]]:
    """Tokens of the reference.  In 16 bits, where rounding differs: tokens of the same engine with
    the kernel and without it."""
    if case.dtype == "float32":
        return [Serving(make_engine(model, case, "reference")).run()]
    return [Serving(make_engine(model, case, "auto", products)).run() for products in (True, False)]


def row_of(name: str, model: str, expected: list[dict[str, list[int]]]) -> tuple[str, ...]:
    """Serve with one kernel broken after the first wave; the last cell names the fault."""
    case, start = TABLE[name].serving, time.perf_counter()
    logger, warnings = logging.getLogger("vllm_metal_lite"), BufferingHandler(1000)
    warnings.setLevel(logging.WARNING)
    problem = ""
    try:
        with pytest.MonkeyPatch.context() as machine:
            change_device(machine, rows_as_decodes=case.few_rows)
            serving = Serving(make_engine(model, case, "auto"))
            logger.addHandler(warnings)
            serving.run(until=WAVE_STEPS)
            with broken(name, case.wrong):
                serving.run()
    except Exception as e:
        problem = f"{type(e).__name__}: {' '.join(str(e).split())[:160]}"
    finally:
        logger.removeHandler(warnings)
    if not problem:
        lines = [record.getMessage() for record in warnings.buffer]
        named = [line for line in lines if f"{name} fails in a step" in line]
        different = sum(
            all(serving.tokens[r] != either[r] for either in expected) for r in serving.tokens
        )
        if len(named) != 1 or len(lines) != 1:
            problem = f"{len(named)} of {len(lines)} warnings name it {lines[:2]}"
        elif different:
            problem = f"{different} of {len(serving.tokens)} requests have other tokens"
    path = "-" if problem else serving.engine.runner.attention.name
    seconds = time.perf_counter() - start
    count = 0 if problem else sum(map(len, serving.tokens.values()))
    return name, path, f"{count}", f"{seconds:.1f}", problem or RIGHT


def rows(kernels: Sequence[str], model: str) -> Iterator[tuple[str, ...]]:
    known: dict[tuple[object, ...], list[dict[str, list[int]]]] = {}
    for name in kernels:
        case = TABLE[name].serving
        kind = case.kv_bits, case.dtype, case.tiny
        if kind not in known:
            known[kind] = expected_tokens(model, case)
        yield row_of(name, model, known[kind])


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="demo", help="demo, a folder, or a Hugging Face name")
    parser.add_argument("--kernels", nargs="+", choices=TABLE, default=list(TABLE))
    args = parser.parse_args()
    logging.getLogger("vllm_metal_lite").propagate = False
    on_host = backend.is_cpu()
    with gpu_or_host() as machine:
        if on_host:
            machine.setattr(mx, "gather_mm", of_16_bits(mx.gather_mm))
        change_device(machine, **SHORT)
        print(f"{backend.describe()}; MLX {mx.__version__}; {args.model}\n")
        heads = ("broken kernel", "attention after it", "tokens", "s", "")
        found = [row[-1] for row in print_table(heads, rows(args.kernels, args.model))]
    print(f"\n{found.count(RIGHT)} of {len(found)} kernels were replaced, no token changed")
    return 0 if set(found) == {RIGHT} else 1


if __name__ == "__main__":
    run_main(main)
