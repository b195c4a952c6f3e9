"""A model of mlx-lm's form that says prepared answers.

What it says next depends on the whole context, and only through its caches:

- head 0 finds the last token that starts a message, by its position among the keys;
- head 1 counts the results of tools (or a recurrent state does, in the hybrid form);
- head 2 finds a token that names the task;
- head 3 looks at the rows of pictures: a bright one moves the script to the next turn.

So a block, a slot or a state that belongs to somebody else changes the answer.
"""

import math
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs, create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, KVCache
from mlx_lm.models.ssm import ssm_update

_DIM = 64
_ANGLE = 2 * math.pi / 2**18  # of one position: contexts up to 262,144 tokens
_SHARP = 1e6


@dataclass
class ModelArgs(BaseModelArgs):
    """shape: of the script: tasks, turns, tokens behind the start of a message."""

    model_type: str = "scripted"
    vocab_size: int = 0
    shape: list[int] = field(default_factory=list)
    start_token: int = 0
    count_token: int = 0
    task_tokens: list[int] = field(default_factory=list)
    hybrid: bool = False
    sees: bool = False
    max_position_embeddings: int = 262144


def _channels(*values: mx.array) -> mx.array:
    """(B, 1, L, _DIM) of values (B, L), then zeros."""
    stacked = mx.stack(values, -1)[:, None]
    return mx.pad(stacked, [(0, 0), (0, 0), (0, 0), (0, _DIM - len(values))])


class Attention(nn.Module):
    def __call__(self, start, count, task, seen, mask, cache):
        """(last start, mean count, task, brightness), and the positions, all (B, L) float32.

        seen: (B, L, 2), a picture's brightness and 1 in its rows, zeros in others.
        """
        ones, zeros = mx.ones_like(start), mx.zeros_like(start)
        x, where = mx.stack([ones, zeros], -1)[:, None], 0 if cache is None else cache.offset
        how = {"traditional": True, "base": None, "scale": 1.0, "freqs": mx.array([1 / _ANGLE])}
        turned = mx.fast.rope(x, 2, offset=where, **how)[:, 0]
        angle = mx.arctan2(turned[..., 1], turned[..., 0])
        positions = mx.round(mx.where(angle < -1e-4, angle + 2 * math.pi, angle) / _ANGLE)
        beside = _channels(zeros), *[_channels(_SHARP * ones)] * 2
        bright, is_picture = seen[..., 0], seen[..., 1]
        q = mx.concatenate([_channels(_SHARP * ones, 4000 * ones), *beside], 1)
        k = mx.concatenate(
            [
                _channels(start, positions / 1000),
                _channels(zeros),
                _channels(mx.minimum(task, 1)),
                _channels(is_picture),
            ],
            1,
        )
        v = mx.concatenate([_channels(x) for x in (positions, count, task, bright)], 1)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        out = scaled_dot_product_attention(q, k, v, cache=cache, scale=1.0, mask=mask)
        return *(out[:, head, :, 0] for head in range(4)), positions


class Counter(nn.Module):
    """A recurrent layer whose state is a sum."""

    def __call__(self, count, cache):
        batch, length = count.shape
        one = mx.zeros(_DIM).at[0].add(1)
        rows = mx.broadcast_to(one, (batch, length, 1, _DIM))
        state = None if cache is None else cache[0]
        arrays = mx.full((batch, length, 1), math.log(math.e - 1)), mx.zeros(1), state
        y, state = ssm_update(
            count[..., None, None] * rows, mx.array([-40.0]), rows, rows, mx.zeros(1), *arrays
        )
        if cache is not None:
            cache[0] = state
            cache.advance(length)
        return y.reshape(batch, length, _DIM)[..., 0]


class Body(nn.Module):
    """The next token of every row, (B, L, 1): small, so that only wanted rows get logits."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.layers = [Attention(), *([Counter()] if args.hybrid else [])]
        self.script = mx.zeros(args.shape, mx.int32)
        if args.sees:
            self.embed_tokens = nn.Embedding(args.vocab_size, 2)

    def __call__(self, inputs, cache=None):
        args = self.args
        cache = cache or [None] * len(self.layers)
        start = (inputs == args.start_token).astype(mx.float32)
        count = (inputs == args.count_token).astype(mx.float32)
        task = mx.zeros_like(start)
        for number, token in enumerate(args.task_tokens):
            task = task + (inputs == token) * float(number + 1)
        mask = create_attention_mask(start[..., None], cache[0])
        seen = mx.zeros((*inputs.shape, 2))
        if args.sees:
            seen = self.embed_tokens(inputs)
        at, mean, task, bright, positions = self.layers[0](start, count, task, seen, mask, cache[0])
        turn = mean * (positions + 1)
        if args.hybrid:
            turn = self.layers[1](count, cache[1])
        turn = turn + bright
        tasks, turns, length = args.shape
        index = [
            mx.clip(mx.round(x), 0, most - 1).astype(mx.int32)
            for x, most in ((task, tasks), (turn, turns), (positions - at, length))
        ]
        return self.script[index[0], index[1], index[2]][..., None]


class Model(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args, self.model_type = args, args.model_type
        self.model = Body(args)

    @property
    def layers(self):
        return self.model.layers

    def make_cache(self):
        return [KVCache(), *([ArraysCache(1)] if self.args.hybrid else [])]

    def __call__(self, inputs, cache=None):
        said = self.model(inputs, cache)
        return mx.where(mx.arange(self.args.vocab_size) == said, 100.0, 0.0)
