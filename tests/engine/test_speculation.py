"""Drafts change how many steps an answer takes, and nothing else."""

from functools import partial
from random import Random

import pytest

from metal.host import installed
from tests.support.engine.guesses import Guesses
from tests.support.kernels.device import change_device
from tests.support.kernels.launches import watch
from tests.support.models import tiny_models as tiny
from vllm_metal_lite import config
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.sampling_params import SamplingParams

# Every kind of attention and of recurrent state: full, windows, chunks, sinks, latents, experts,
# shared K and V; kernels' recurrences, those computed by MLX, and layers that see sequences.
NAMES = [
    "llama", "llama/window", "llama/llama3_rope", "llama4", "mixtral", "qwen3", "qwen3_moe",
    "gemma2", "gemma3_text", "gemma3n", "gemma4_text/shared_kv", "gpt_oss", "deepseek_v3",
    "glm4_moe_lite", "mimo_v2_flash", "qwen3_next", "qwen3_next/q4", "qwen3_5", "qwen3_5_moe",
    "lfm2", "lfm2_moe", "nemotron_h", "granitemoehybrid", "kimi_linear", "mamba2", "falcon_h1",
    "plamo2", "olmo_hybrid", "mamba", "rwkv7", "recurrent_gemma", "jamba", "baichuan_m1",
    "gpt_bigcode", "deepseek_v32",
]  # fmt: skip


def run(engine, prompts, params, truth=None, **how):
    """The finished outputs, in order.  truth: the tokens that drafts are made of."""
    if truth is not None:
        ids = [str(i) for i in range(len(prompts))]
        if params.n > 1:
            ids = [f"{i}#{j}" for i in ids for j in range(params.n)]
        engine.in_flight.speculator = Guesses(engine, dict(zip(ids, truth, strict=True)), **how)
    return tiny.outputs(engine, prompts, params)


def tokens_of(outputs):
    return [answer.token_ids for output in outputs for answer in output.outputs]


drafting = partial(tiny.engine, speculate="auto")
greedy = partial(tiny.greedy, ignore_eos=True)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_the_model_alone(name):
    prompts = tiny.prompts(4, 1, 30, seed=3)
    alone = [tiny.alone(tiny.native(name), prompt, 40) for prompt in prompts]
    engine = drafting(name, num_blocks=34, max_model_len=100, max_num_batched_tokens=32)
    assert tokens_of(run(engine, prompts, greedy(40), alone, seed=1)) == alone
    metrics = engine.metrics()
    assert metrics["draft_tokens"] > metrics["accepted_tokens"] > 20
    assert metrics["prefill_tokens"] == sum(map(len, prompts)) + metrics["recomputed_tokens"]
    assert metrics["decode_tokens"] == 4 * 39


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma3_text", "rwkv7"])
def test_true_drafts_save_steps(name):
    prompts = tiny.prompts(2, 5, 9, seed=4)
    alone = [tiny.alone(tiny.native(name), prompt, 60) for prompt in prompts]
    plain, drafted = tiny.engine(name), drafting(name)
    assert tokens_of(run(plain, prompts, greedy(60))) == alone
    assert tokens_of(run(drafted, prompts, greedy(60), alone, right=1.0)) == alone
    assert drafted.metrics()["steps"] < 0.7 * plain.metrics()["steps"]
    assert drafted.metrics()["accepted_tokens"] == drafted.metrics()["draft_tokens"] > 40


def test_drafts_behind_the_end_of_an_answer_are_not_counted():
    (prompt,) = tiny.prompts(1, 5, 5, seed=4)
    alone = tiny.alone(tiny.native("llama"), prompt, 40)
    stop = next(i for i in range(4, 40) if alone[i] not in alone[:i])
    engine = drafting("llama")
    engine.in_flight.speculator = Guesses(engine, {"0": alone}, right=1.0)
    engine.in_flight.speculator.propose = lambda wanted: [alone[1:30] for _ in wanted]
    engine.in_flight.speculator.wants = lambda decodes: True
    engine.add_request("0", prompt, greedy(40, stop_token_ids=[alone[stop]]))
    (answer,) = tiny.run(engine)["0"].outputs
    assert answer.token_ids == alone[: stop + 1]
    metrics = engine.metrics()
    assert metrics["draft_tokens"] > stop
    assert (metrics["accepted_tokens"], metrics["decode_tokens"]) == (stop - 1, stop)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.9},
        {"temperature": 1.2, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.5},
        {"temperature": 0, "frequency_penalty": 1.5},
        {"min_tokens": 25, "stop_token_ids": list(range(0, 96, 3))},
        {"logit_bias": {7: 3.0, 9: -5.0}, "allowed_token_ids": list(range(40))},
        {"logprobs": 3, "n": 3},
        {"logprobs": 0, "prompt_logprobs": 2, "repetition_penalty": 1.2},
    ],
    ids=lambda params: "-".join(params),
)
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_every_parameter_counts_as_without_drafts(name, params):
    prompts = tiny.prompts(3, 3, 20, seed=6)
    params = SamplingParams(**{"temperature": 0.8, "seed": 5, "max_tokens": 40, **params})
    plain = run(tiny.engine(name), prompts, params)
    truth = tokens_of(plain)
    for seed in range(2):
        drafted = run(drafting(name), prompts, params, truth, seed=seed)
        assert tokens_of(drafted) == truth
        for a, b in zip(plain, drafted, strict=True):
            assert_alike(a.prompt_logprobs, b.prompt_logprobs)
            for x, y in zip(a.outputs, b.outputs, strict=True):
                assert (x.finish_reason, x.stop_reason) == (y.finish_reason, y.stop_reason)
                assert_alike(x.logprobs, y.logprobs)


def assert_alike(expected, got):
    """The same log-probabilities, except for the rounding of rows beside other rows."""
    assert (expected is None) == (got is None)
    for a, b in zip(expected or (), got or (), strict=True):
        assert (a or {}).keys() == (b or {}).keys()
        for token in a or ():
            assert a[token].rank == b[token].rank
            assert a[token].logprob == pytest.approx(b[token].logprob, abs=2e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_bad_words_are_matched_across_drafts(name):
    engine = tiny.engine(name)
    prompts = tiny.prompts(2, 4, 9, seed=2)
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=40)
    said = tokens_of(run(engine, prompts, params))[0]
    words = [said[3:5], said[10:13], [said[20]]]
    found = []
    for truth in (None, [said, said]):
        engine = tiny.engine(name)
        if truth:
            engine.in_flight.speculator = Guesses(engine, {"0": truth[0]}, right=1.0)
        engine.add_request("0", prompts[0], params)
        engine._answers["0"].bad_words = words
        found.append(tiny.run(engine)["0"].outputs[0].token_ids)
    assert found[0] == found[1] != said
    assert said[20] not in found[1]


@pytest.mark.parametrize("name", ["llama", "llama/window", "qwen3_next", "rwkv7"])
@pytest.mark.parametrize("seed", range(3))
def test_aborts_failures_preemption_and_the_prefix_cache(name, seed):
    random = Random(seed)
    stem = tiny.prompts(1, 20, 20, seed=8)[0]
    prompts = [stem[: random.randrange(1, 20)] + p for p in tiny.prompts(7, 1, 12, seed=seed)]
    alone = [tiny.alone(tiny.native(name), prompt, 30) for prompt in prompts]
    engine = drafting(
        name, num_blocks=14, max_model_len=80, max_num_seqs=4, max_num_batched_tokens=24
    )
    engine.in_flight.speculator = Guesses(engine, {str(i): t for i, t in enumerate(alone)}, seed)
    done, waiting, execute = {}, list(range(len(prompts))), engine.runner.execute

    def execute_or_fail(*args, **how):
        if random.random() < 0.08:
            raise OSError("the device")
        return execute(*args, **how)

    engine.runner.execute = execute_or_fail
    aborted = random.randrange(len(prompts))
    for _ in range(3000):
        if waiting and random.random() < 0.4:
            engine.add_request(str(waiting[0]), prompts[waiting.pop(0)], greedy(30))
        if random.random() < 0.02:
            engine.abort(str(aborted))
        done |= tiny.step(engine, OSError)
        if not (waiting or engine.has_unfinished_requests()):
            break
    assert engine.metrics()["accepted_tokens"] > 10
    for i, expected in enumerate(alone):
        if i != aborted:
            assert done[str(i)].outputs[0].token_ids == expected


@pytest.mark.parametrize("name", ["qwen3_next", "granitemoehybrid"])
def test_the_next_turn_starts_behind_a_drafted_answer(name):
    """Its states are kept where a block ends, drafts or not."""
    prompt = tiny.prompts(1, 20, 20, seed=1)[0]
    alone = tiny.alone(tiny.native(name), prompt, 30)
    hits = []
    for truth in (None, [alone]):
        engine = tiny.engine(name, state_cache_gib=0.01)
        assert tokens_of(run(engine, [prompt], greedy(30), truth, right=1.0)) == [alone]
        engine.in_flight.speculator = None
        turn = prompt + alone + [5]
        done = tiny.ask(engine, turn, greedy(8))
        assert done.outputs[0].token_ids == tiny.alone(tiny.native(name), turn, 8)
        hits.append(done.num_cached_tokens)
    assert hits[0] == hits[1] == 48


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "deepseek_v3", "gpt_oss"])
def test_through_host_kernels(name):
    prompts = tiny.prompts(3, 2, 20, seed=9)
    alone = [tiny.alone(tiny.native(name), prompt, 16) for prompt in prompts]
    with installed():
        engine = tiny.engine_with_kernels(name, speculate="auto")
        assert engine.runner.path.uses_kernels
        assert tokens_of(run(engine, prompts, greedy(16), alone)) == alone
        assert engine.metrics()["accepted_tokens"] > 5


@pytest.mark.parametrize("name", ["llama/window", "qwen3", "deepseek_v3", "gpt_oss"])
def test_through_host_kernels_that_read_contexts_once(monkeypatch, name):
    """Requests with drafts and without, in splits of their contexts."""
    how = {"min_split_context": 8, "min_split_keys": 8, "min_prefix_split_keys": 8}
    change_device(monkeypatch, **how, max_own_keys=0)
    launched, prompts = [], tiny.prompts(3, 20, 40, seed=9)
    watch(monkeypatch, lambda kernel, _, template: launched.append((kernel, template)))
    alone = [tiny.alone(tiny.native(name), prompt, 16) for prompt in prompts]
    with installed():
        engine = tiny.engine_with_kernels(name, speculate="auto")
        assert tokens_of(run(engine, prompts, greedy(16), alone)) == alone
        assert engine.metrics()["accepted_tokens"] > 5
    kernel, value = ("latent_attention", "PARTIAL") if "v3" in name else ("varlen_prefill", "SPLIT")
    assert any(k == kernel and template[value] for k, template in launched)


@pytest.mark.parametrize("num_rows", [10, 4])
def test_a_step_samples_no_more_rows_than_the_memory_plan_counts(monkeypatch, num_rows):
    monkeypatch.setattr(config, "_MAX_LOGITS_ROWS", num_rows)
    prompts = tiny.prompts(3, 4, 9, seed=2)
    alone = [tiny.alone(tiny.native("llama"), prompt, 30) for prompt in prompts]
    engine, rows = drafting("llama", max_num_seqs=3), []
    engine.on_step = lambda out: rows.append([1 + len(s.draft_token_ids) for s in out.segments])
    assert tokens_of(run(engine, prompts, greedy(30), alone, right=1.0)) == alone
    assert max(map(sum, rows)) == num_rows
    assert any(len(row) == 3 and max(row) - min(row) < 2 < max(row) for row in rows) == (
        num_rows > 8
    )


def test_the_option_is_checked():
    with pytest.raises(ConfigError, match="speculate must be off, lookup or auto, got 'yes'"):
        EngineConfig(speculate="yes")


def test_no_step_waits_for_drafts_that_have_no_state_slot():
    """A segment with drafts needs a second slot; here the only one belongs to the request."""
    engine = drafting("qwen3_5", max_num_seqs=1, state_cache_gib=0)
    wants = engine.in_flight.speculator.wants
    asked = []
    engine.in_flight.speculator.wants = lambda decodes: asked.append(decodes) or wants(decodes)
    (output,) = run(engine, [[5, 6, 7, 8] * 6], greedy(24))
    assert len(output.outputs[0].token_ids) == 24
    assert not asked
