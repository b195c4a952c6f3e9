"""The tokens that a sampler should draw, in float64 and one row at a time; helpers to run one."""

import math

import numpy as np

from tests.support.engine.fake_model import splitmix64
from vllm_metal_lite.backend import mx
from vllm_metal_lite.sampling.sampler import Sampler
from vllm_metal_lite.sampling_params import SamplingParams

EOS = (3,)
EMPTY = np.zeros(0, np.int32)

SEEDED = SamplingParams(
    temperature=1.2,
    top_k=40,
    top_p=0.97,
    repetition_penalty=1.3,
    frequency_penalty=0.2,
    min_tokens=4,
    stop_token_ids=[9],
    logit_bias={4: 2.0},
)
VOCAB = 6400
PROMPT = np.array([5, 6, 7, 5], np.int32)


# Reference


def reference_penalized(raw, params, prompt, output):
    x = raw.astype(np.float64).copy()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(output) < params.min_tokens:
        stops = [*(params.stop_token_ids or ()), *(() if params.ignore_eos else EOS)]
        x[[t for t in stops if t < len(x)]] = -np.inf
    counts = np.bincount(np.asarray(output, int), minlength=len(x))
    seen = counts > 0
    seen[np.asarray(prompt, int)] = True
    r = params.repetition_penalty
    x = np.where(seen, np.where(x > 0, x / r, x * r), x)
    return x - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def reference_keep(x, params):
    """Which tokens may be drawn, by sorting and un-sorting as the textbook does it."""
    z = x / params.temperature
    z = z - z.max()
    z[np.exp(z) < params.min_p] = -np.inf
    order = np.argsort(-z, kind="stable")
    if 0 < params.top_k < len(x):
        z[order[params.top_k :]] = -np.inf
    p = np.exp(z) / np.exp(z).sum()
    mass_before = np.cumsum(p[order]) - p[order]
    drop = order[mass_before >= params.top_p]
    z[drop[drop != order[0]]] = -np.inf
    return z > -np.inf


def reference_noise(seed, step, vocab_size):
    golden, m = 0x9E3779B97F4A7C15, 2**64 - 1
    key = splitmix64((splitmix64((seed + golden) & m) + step * golden) & m)
    key = mx.array(np.array([key & 0xFFFFFFFF, key >> 32], np.uint32))
    bits = np.array(mx.random.split(key, -(-vocab_size // 2))).ravel()[:vocab_size]
    return -np.log(-np.log1p(-(bits.astype(np.float64) + 0.5) / 2**32))


def reference_scores(raw, params, seed, prompt, output):
    x = reference_penalized(raw, params, prompt, output)
    if params.greedy:
        return x
    x = np.where(reference_keep(x, params), x, -np.inf)
    return x + params.temperature * reference_noise(seed, len(output), len(x))


# Helpers


def make(params, seeds, vocab_size, prompt=EMPTY, output=EMPTY, eos=EOS):
    """A sampler with a row for every seed."""
    sampler = Sampler(len(seeds), vocab_size)
    tokens = np.concatenate([prompt, output]).astype(np.int32)
    for i, seed in enumerate(seeds):
        sampler.add(i, params, seed, tokens, len(prompt), eos)
    return sampler


def draw(sampler, logits, steps):
    """(steps, rows) tokens, every row from the same logits (V,)."""
    rows = np.arange(len(sampler.state[0]))
    x = mx.broadcast_to(mx.array(logits), (len(rows), len(logits)))
    out = [sampler(x, rows).token_ids for _ in range(steps)]
    return np.array(mx.stack(out))


def random_logits(seed, *shape, scale=3.0):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


def assert_fits(counts, probs):
    """Assert by chi-square that the counts follow the probabilities."""
    assert counts[probs == 0].sum() == 0
    expected, counts = probs[probs > 0] * counts.sum(), counts[probs > 0]
    stat, df = ((counts - expected) ** 2 / expected).sum(), len(expected) - 1
    # Wilson and Hilferty: the cube root is nearly normal; 3.1 sigma is p = 0.001.
    z = ((stat / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    assert z < 3.1, f"chi-square {stat:.1f} at {df} degrees of freedom"


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def log_softmax(logits):
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def drawn(params, x, rows=400, steps=10):
    return set(draw(make(params, range(rows), len(x)), x, steps).ravel().tolist())
