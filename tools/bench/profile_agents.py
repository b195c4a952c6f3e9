#!/usr/bin/env python3
"""Where the time of agents' sessions goes, step by step: the engine alone, with no server.

    python -m tools.bench.profile_agents --model qwen3.5-4b --sessions 8 --turns 6      a GPU
    python -m tools.bench.profile_agents --model qwen3.5-tiny --sessions 3 --turns 2 --scale 0.02

Sessions are those of bench/agents.py, as token ids; a session's next turn begins when its answer
ends.  Steps are launched one ahead, so the time of a call of `LLMEngine.step` is mostly that of the
step it waits for, and counts as that step's.  "execute" builds the step's graph and hands it to
MLX; "compiled" steps are those whose graph was kept.  --kernels: one turn more, and what runs on an
NVIDIA GPU while all sessions decode.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tools.bench.agents import OUT, SHARED, TURNS, new_tokens
from tools.bench.lib.alone import Alone
from tools.bench.lib.models import BITS, get_model
from tools.bench.lib.tables import table_head
from tools.bench.lib.trust import trusted
from tools.bench.profile_step import kernels
from tools.dev.run_main import run_main
from vllm_metal_lite import EngineConfig, LLMEngine, SamplingParams

_ONE_MORE, _PROFILED = 600, 20  # tokens of a turn for --kernels, and steps


class Sessions:
    """Conversations that share their start.  Each has a request in the engine at a time."""

    def __init__(
        self, engine: LLMEngine, count: int, turns: int, scale: float, seed: int = 0
    ) -> None:
        self.engine, self.scale = engine, scale
        self._rng = np.random.default_rng(seed)
        self._params = SamplingParams(
            temperature=0, max_tokens=max(int(OUT * scale), 4), ignore_eos=True
        )
        shared = self._tokens(SHARED)
        self._prompts = {str(i): shared.copy() for i in range(count)}
        self._new = {name: list(new_tokens(self._rng, turns)) for name in self._prompts}

    def _tokens(self, count: float) -> list[int]:
        tokens = self._rng.integers(
            0, self.engine.model.vocab_size, max(int(count * self.scale), 4)
        )
        return list(tokens.tolist())

    def _ask(self, name: str) -> None:
        """The next turn of a session that has one."""
        if self._new[name]:
            self._prompts[name] += self._tokens(self._new[name].pop(0))
            self.engine.add_request(name, self._prompts[name], self._params)

    def one_more(self) -> None:
        """Each session asks again; the steps are the caller's."""
        for name, new in self._new.items():
            new.append(_ONE_MORE)
            self._ask(name)

    def run(self) -> Iterator[None]:
        """Step until all turns are answered."""
        for name in self._prompts:
            self._ask(name)
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            yield
            for output in outputs:
                if output.finished:
                    self._prompts[output.request_id] += output.outputs[0].token_ids
                    self._ask(output.request_id)


class Launch(NamedTuple):
    """rows: of prompts.  decodes: requests.  seconds: of `ModelRunner.execute`."""

    rows: int
    decodes: int
    compiled: bool
    seconds: float

    @property
    def kind(self) -> tuple[str, bool]:
        if not self.rows:
            few = "decodes, 5 and more" if self.decodes > 4 else "decodes, 1 to 4"
            return few, self.compiled
        size = "over 256" if self.rows > 256 else "to 256"
        return f"prompts, {size} rows" + (", and decodes" if self.decodes else ""), self.compiled


def launches_of(engine: LLMEngine) -> list[Launch]:
    """A list that gets an entry for each step that is launched from now on."""
    runner, found = engine.pipeline.runner, []
    execute = runner.execute

    def noting(batch: Any, *args: Any, **kwargs: Any) -> Any:
        before, start = runner.compiled.num_steps, time.perf_counter()
        result = execute(batch, *args, **kwargs)
        seconds = time.perf_counter() - start
        found.append(
            Launch(
                batch.num_tokens - batch.num_decodes, batch.num_decodes,
                runner.compiled.num_steps > before, seconds,
            )
        )  # fmt: skip
        return result

    runner.execute = noting  # type: ignore[method-assign]
    return found


def report(launches: list[Launch], seconds: list[float]) -> None:
    """A row for each kind of step.  launches, seconds: step by step."""
    kinds: dict[tuple[str, bool], list[tuple[Launch, float]]] = defaultdict(list)
    for launch, took in zip(launches, seconds, strict=True):
        kinds[launch.kind].append((launch, took))
    table_head(["steps", "compiled", "count", "seconds", "median ms", "p90", "most", "execute, ms"])
    for (kind, compiled), steps in sorted(kinds.items()):
        took = 1e3 * np.array([t for _, t in steps])
        execute = 1e3 * np.median([launch.seconds for launch, _ in steps])
        print(
            f"| {kind} | {'yes' if compiled else 'no'} | {len(steps)} | {took.sum() / 1e3:.2f} | "
            f"{np.median(took):.2f} | {np.quantile(took, 0.9):.2f} | {took.max():.2f} | "
            f"{execute:.2f} |",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="256x2")
    parser.add_argument("--bits", choices=BITS)
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--warm", type=int, default=1, help="sessions of two turns before those")
    parser.add_argument("--num-blocks", type=int, help="of the store")
    parser.add_argument("--memory-fraction", type=float, help="as the server has it")
    parser.add_argument("--trusted", action="store_true", help="as bench/serving.py has it")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="as bench/serving.py has it")
    parser.add_argument("--kernels", action="store_true", help="CUDA only; needs torch")
    args = parser.parse_args()
    if min(args.sessions, args.turns, args.warm) < 1 or args.scale <= 0:
        parser.error("--sessions, --turns and --warm must be at least 1, --scale above 0")
    alone = Alone(args.beside)
    with trusted() if args.trusted else nullcontext():
        config = EngineConfig(
            max_num_seqs=args.sessions, num_blocks=args.num_blocks,
            memory_fraction=args.memory_fraction,
        )  # fmt: skip
        engine = LLMEngine(get_model(args.model, bits=args.bits), config)
    for _ in Sessions(engine, args.warm, 2, args.scale, seed=1).run():
        pass
    sessions = Sessions(engine, args.sessions, args.turns, args.scale)
    launches, seconds = launches_of(engine), []
    with alone():
        before, begin = engine.metrics(), time.perf_counter()
        start = begin
        for _ in sessions.run():
            now = time.perf_counter()
            seconds.append(now - start)
            start = now
        total, after = time.perf_counter() - begin, engine.metrics()
        gib = {name: after[f"memory_{name}_bytes"] / 2**30 for name in ("active", "cached")}
        report(launches, seconds)
        per_minute = 60 * args.sessions / total
        print(f"\n{total:.1f} s: {per_minute:.2f} sessions a minute with nothing around the engine")
        print(f"Memory at the end: {gib['active']:.1f} GiB, and {gib['cached']:.1f} in MLX's cache")
        changed = {
            name: after[name] - before[name] for name in after if not name.startswith("memory")
        }
        print(", ".join(f"{name} {count:,}" for name, count in changed.items() if count))
        if args.kernels:
            sessions.one_more()
            while launches[-1].rows or launches[-1].decodes < args.sessions:
                engine.step()
            kernels(engine.step, _PROFILED)
    return 0


if __name__ == "__main__":
    run_main(main)
