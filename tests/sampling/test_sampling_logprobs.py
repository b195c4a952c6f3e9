"""Log-probabilities, and the operations that a batch without options does not run."""

import re
import shutil

import numpy as np
import pytest

from tests.support.engine.sampling import (
    EOS,
    PROMPT,
    SEEDED,
    VOCAB,
    draw,
    log_softmax,
    make,
    random_logits,
)
from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.sampling.logprobs import prompt_logprobs
from vllm_metal_lite.sampling.sampler import Sampler
from vllm_metal_lite.sampling_params import SamplingParams

# Logprobs


def check_logprobs(arrays, raw, chosen, k):
    expected = log_softmax(raw)
    order = np.argsort(-raw, axis=1, kind="stable")[:, :k]
    ids = np.concatenate([chosen[:, None], order], 1)
    assert (arrays.token_ids.dtype, arrays.logprobs.dtype) == (mx.int32, mx.float32)
    assert arrays.ranks.dtype == mx.int32
    np.testing.assert_array_equal(np.array(arrays.token_ids), ids)
    np.testing.assert_allclose(
        np.array(arrays.logprobs), np.take_along_axis(expected, ids, 1), atol=4e-6
    )
    rank = 1 + (raw > np.take_along_axis(raw, chosen[:, None], 1)).sum(1)
    np.testing.assert_array_equal(np.array(arrays.ranks), rank)


@pytest.mark.parametrize("vocab_size", [70, 6400, 5003, 151_936])
@pytest.mark.parametrize("k", [0, 1, 5, 20, 64])
@pytest.mark.parametrize("ties", [False, True])
def test_prompt_logprobs(vocab_size, k, ties):
    x = random_logits(k, 7, vocab_size)
    x = x.round(0) if ties else x
    targets = np.random.default_rng(1).integers(0, vocab_size, 7)
    out = prompt_logprobs(mx.array(x), mx.array(targets.astype(np.int32)), k)
    check_logprobs(out, x, targets, k)


def test_a_long_prompt_is_scored_in_parts():
    x = random_logits(4, 600, 90)
    targets = np.random.default_rng(1).integers(0, 90, 600)
    out = prompt_logprobs(mx.array(x), mx.array(targets.astype(np.int32)), 3)
    check_logprobs(out, x, targets, 3)


def test_logprobs_are_of_the_raw_logits_and_as_many_as_the_most_demanding_row_wants():
    size = 3000
    x = random_logits(2, 4, size)
    sampler = Sampler(6, size)
    biased = {"logit_bias": {int(x[1].argmax()): -50.0}, "temperature": 0.0}
    for row, params in enumerate(
        [
            SamplingParams(temperature=2.0, logprobs=2),
            SamplingParams(**biased, logprobs=5),
            SamplingParams(temperature=3.0, top_k=4, repetition_penalty=3.0),
            SamplingParams(temperature=0, logprobs=0),
        ]
    ):
        sampler.add(row, params, row, np.array([1, 2]), 2, EOS)
    rows = np.array([2, 0, 1, 3])
    out = sampler(mx.array(x[rows]), rows)
    chosen = np.array(out.token_ids)
    check_logprobs(out.logprobs, x[rows], chosen, 5)
    assert np.array(out.logprobs.ranks)[2] == 2  # the runner-up, as the best was biased away
    only = np.array([3])
    check_logprobs(sampler(mx.array(x[only]), only).logprobs, x[only], x[only].argmax(1), 0)
    assert sampler(mx.array(x[[2]]), np.array([2])).logprobs is None


def test_a_row_may_name_the_tokens_to_score():
    size, named = 3000, {0: [7, 2999, 0], 2: [5]}
    x = random_logits(3, 3, size)
    sampler, rows = Sampler(3, size), np.arange(3)
    for row in range(3):
        params = SamplingParams(temperature=0.0, logprobs=2 if row == 1 else None)
        sampler.add(
            row, params, row, np.array([1, 2]), 2, EOS, logprob_token_ids=named.get(row, ())
        )
    found = sampler(mx.array(x), rows).logprobs
    best = prompt_logprobs(mx.array(x), mx.array(x.argmax(1)), 3)
    scores = log_softmax(x)
    for row in range(3):
        expected = [int(x[row].argmax()), *named.get(row, best.token_ids[row, 1:3].tolist())]
        ids, values = (np.array(a)[row, : len(expected)] for a in (found.token_ids, found.logprobs))
        assert ids.tolist() == expected
        np.testing.assert_allclose(values, scores[row, expected], atol=4e-6)
    sampler.remove(0)
    sampler.remove(2)
    assert sampler(mx.array(x[[1]]), rows[[1]]).logprobs.token_ids.shape == (1, 3)


def test_logprobs_of_masked_tokens_are_minus_infinity():
    x = np.full((1, 10), -np.inf, np.float32)
    x[0, 4] = 3.0
    out = prompt_logprobs(mx.array(x), mx.array([2]), 2)
    assert out.logprobs.tolist() == [[-np.inf, 0.0, -np.inf]]
    assert out.ranks.tolist() == [2]


# What enters the graph


def test_the_graph_holds_only_what_the_rows_ask_for(tmp_path):
    size = 64_000

    def graph(**kw):
        sampler = make(SamplingParams(**{"temperature": 0.0, **kw}), range(3), size)
        x = mx.zeros((3, size))
        mx.eval(x)
        mx.export_to_dot(str(tmp_path / "graph"), sampler(x, np.arange(3)).token_ids)
        dot = (tmp_path / "graph").read_text()
        return re.findall(r'label ?= ?"([^"]+)", shape ?= ?rectangle', dot)

    greedy = graph()
    assert "ArgReduce" in greedy
    assert set(greedy) <= {"ArgReduce", "Squeeze", "View int32"}
    assert graph(top_k=5, top_p=0.5, min_p=0.5) == greedy
    assert not {"Sort", "Partition", "Exp", "Select"} & set(graph(temperature=1.0))
    assert graph(temperature=1.0).count("RandomBits") == 1
    # Top-p alone needs one sort of the row, a small top-k small ones only.
    assert [p for p in graph(temperature=1.0, top_p=0.9) if "Sort" in p] == ["Sort"]
    assert len(graph(logit_bias={1: 1.0})) == len(greedy) + 2
    # Each kind of penalty brings its own operations only.
    assert "RightShift" not in graph(repetition_penalty=1.5)
    assert "Divide" not in graph(presence_penalty=1.5)


def test_a_call_evaluates_nothing():
    size = 20_000
    sampler = make(SEEDED, range(8), size, PROMPT)
    x = mx.array(random_logits(0, 8, size))
    mx.eval(x, sampler.state[1])
    before = mx.get_active_memory()
    out = sampler(x, np.arange(8))
    assert mx.get_active_memory() - before < x.nbytes // 8
    mx.eval(out.token_ids)


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("g++"), reason="MLX fuses on a CPU with a C++ compiler")
def test_fused_operations_equal_the_plain_ones(monkeypatch):
    x = random_logits(6, 4, VOCAB)
    run = lambda: make(SEEDED, range(4), VOCAB, PROMPT)  # noqa: E731
    plain = draw(run(), x[0], 4)
    monkeypatch.setattr(backend, "is_cpu", lambda: False)
    np.testing.assert_array_equal(draw(run(), x[0], 4), plain)
    # Any number of rows with one compilation.
    sampler = run()
    assert sampler(mx.array(x[:1]), np.array([0])).token_ids.item() == plain[0, 0]
