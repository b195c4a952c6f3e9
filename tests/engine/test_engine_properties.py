"""Random requests under random options: the invariants of the engine, over real tiny models.

Greedy tokens are compared with mlx-lm's alone, sampled ones with the same request alone in an
engine that has room for everything.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine.poison import poison_free_blocks
from tests.support.models import tiny_models as tiny
from vllm_metal_lite.config import PREFILL_POLICIES
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.sampling_params import SamplingParams
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput

NAMES = [
    "llama",
    "llama/window/w9",
    "mixtral",
    "granitemoehybrid",
    "deepseek_v3",
    "gemma4_text",
    "recurrent_gemma",
]
STEMS = tiny.prompts(3, 20, 45, seed=21)
SEEDS = 35


@dataclass(frozen=True)
class Wish:
    """A request, the time at which it comes, and perhaps the time at which its user leaves."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int
    abort_after: int | None
    priority: int
    spans: tuple[tuple[int, int], ...]


def pick(rng: np.random.Generator, *values):
    return values[rng.integers(len(values))]


def make_spans(rng: np.random.Generator, size: int) -> tuple[tuple[int, int], ...]:
    """Half of the prompts have spans."""
    cuts = sorted({int(cut) for cut in rng.integers(0, size + 1, pick(rng, 0, 0, 2, 4))})
    return tuple(pairwise(cuts))[::2]


def make_wish(rng: np.random.Generator, others: np.random.Generator) -> Wish:
    stem = pick(rng, *STEMS)[: rng.integers(0, 46)]
    tail = rng.integers(0, 7, rng.integers(1, 5)).tolist()
    sampled = pick(rng, True, False)
    params = SamplingParams(
        temperature=0.8 if sampled else 0.0,
        top_k=pick(rng, 0, 20) if sampled else 0,
        seed=int(rng.integers(4)) if sampled else None,
        n=pick(rng, 1, 1, 1, 2),
        frequency_penalty=pick(rng, 0.0, 0.5) if sampled else 0.0,
        logprobs=pick(rng, None, None, 2),
        prompt_logprobs=pick(rng, None, None, None, 1),
        max_tokens=pick(rng, 1, 2, 5, 9, 17, 24, 30, 36),
    )
    how = {"abort_after": pick(rng, None, None, None, int(rng.integers(20)))}
    how["priority"] = int(rng.integers(-1, 2))
    how["spans"] = make_spans(others, len(stem + tail))
    return Wish(tuple(stem + tail), params, arrival=int(rng.integers(12)), **how)


def make_options(rng: np.random.Generator, others: np.random.Generator) -> dict:
    return {
        "num_blocks": pick(rng, 10, 11, 12, 16, 40),
        "max_num_batched_tokens": pick(rng, 9, 16, 33, 80, 200),
        "max_num_seqs": pick(rng, 1, 4, 8, 8),
        "long_prefill_token_threshold": pick(rng, 0, 0, 16, 19),
        "prefill_policy": pick(others, *PREFILL_POLICIES),
        "enable_prefix_caching": pick(rng, True, False),
        "block_size": pick(rng, 8, 8, 8, 16),
    }


_big_engines: dict = {}
_answers: dict = {}
preemptions, hits = [], []


def answers_alone(name: str, wish: Wish) -> list[list[int]]:
    if wish.params.greedy:
        tokens = tiny.alone(tiny.native(name), wish.prompt, wish.params.max_tokens)
        return [tokens] * wish.params.n
    key = (name, wish.prompt, repr(wish.params))
    if key not in _answers:
        if name not in _big_engines:
            _big_engines[name] = tiny.engine(
                name, num_blocks=100, max_num_batched_tokens=256, enable_prefix_caching=False
            )
        engine = _big_engines[name]
        engine.add_request("x", list(wish.prompt), wish.params)
        _answers[key] = [o.token_ids for o in tiny.run(engine)["x"].outputs]
    return _answers[key]


def check_metrics(engine) -> None:
    m = engine.metrics()
    for kind in ["", *(f"_window_{g.window}" for g in engine.kv_groups[1:])]:
        free, cached, owned = (m[f"blocks_{state}{kind}"] for state in ("free", "cached", "owned"))
        assert free + cached + owned == m[f"blocks_total{kind}"]
    assert m["requests_running"] <= engine.config.max_num_seqs


def check_spans(out: SchedulerOutput) -> None:
    for segment in out.segments:
        for start, end in segment.request.spans:
            assert not start < segment.num_computed < end
            assert not start < segment.end < end


def check_output(name: str, wish: Wish, output) -> None:
    for answer, alone in zip(output.outputs, answers_alone(name, wish), strict=True):
        if answer.finish_reason == "abort":
            assert answer.token_ids == alone[: len(answer.token_ids)]
        else:
            assert answer.token_ids == alone
            assert answer.finish_reason == "length"
        if wish.params.logprobs is not None:
            assert [next(iter(p)) for p in answer.logprobs] == answer.token_ids
            assert answer.cumulative_logprob == pytest.approx(
                sum(p[t].logprob for p, t in zip(answer.logprobs, answer.token_ids, strict=True))
            )
    done = all(o.finish_reason == "length" for o in output.outputs)
    if wish.params.prompt_logprobs is not None and done:
        assert len(output.prompt_logprobs) == len(wish.prompt)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_happens_every_request_gets_its_own_tokens(seed):
    rng = np.random.default_rng(seed + 1000)  # no draw of these is within rounding of a tie
    others = np.random.default_rng(seed)
    name = NAMES[seed % len(NAMES)]
    wishes = [make_wish(rng, others) for _ in range(rng.integers(1, 13))]
    engine = tiny.engine(name, **make_options(rng, others))
    engine.on_step = check_spans
    poison_free_blocks(engine)
    budget, largest = engine.config.max_num_batched_tokens, []
    execute = engine.runner.execute
    engine.runner.execute = lambda b, *a: (largest.append(b.num_tokens), execute(b, *a))[1]
    added, done, refused = {}, {}, 0
    for step in range(1500):
        for i, wish in enumerate(wishes):
            if wish.arrival == step:
                try:
                    how = {"priority": wish.priority}
                    prompt = {"prompt_token_ids": wish.prompt, "spans": wish.spans}
                    engine.add_request(str(i), prompt, wish.params, **how)
                    added[str(i)] = wish
                except RequestError:  # too long for this pool, or a span for a step
                    refused += 1
            elif wish.abort_after is not None and step == wish.arrival + wish.abort_after:
                done |= {o.request_id: o for o in engine.abort(str(i))}
        done |= tiny.step(engine)
        check_metrics(engine)
        if step > 25 and not engine.has_unfinished_requests():
            break
    assert done.keys() == added.keys(), "a request was lost"
    assert len(added) + refused == len(wishes)
    for request_id, wish in added.items():
        check_output(name, wish, done[request_id])
    assert max(largest, default=0) <= budget
    metrics = engine.metrics()
    assert metrics["blocks_owned"] == metrics["requests_waiting"] == 0
    preemptions.append(metrics["preemptions"])
    hits.append(metrics["prefix_cache_hit_tokens"])


def test_the_runs_above_were_not_all_easy():
    """Preemption and shared prefixes really happened, in many of them."""
    if len(preemptions) < SEEDS:
        pytest.skip("the property test was not run with every seed")
    assert np.count_nonzero(preemptions) > len(preemptions) / 8
    assert np.count_nonzero(hits) > len(hits) / 8


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.sampled_from(NAMES))
@settings(max_examples=25)
def test_chunked_equals_single_shot_for_any_split(splits, name):
    """The split is forced, step by step, through the budget."""
    prompt = STEMS[0] + STEMS[1]
    engine = tiny.engine(name, enable_prefix_caching=False, max_num_batched_tokens=128)
    engine.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=4))
    request = engine._answers["a"].request
    done = {}
    for split in splits:
        request.max_chunk = split
        done |= tiny.step(engine)
    request.max_chunk = 0
    done |= tiny.run(engine)
    assert done["a"].outputs[0].token_ids == tiny.alone(tiny.native(name), prompt, 4)
