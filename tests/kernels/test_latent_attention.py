"""latent_attention, executed on the CPU host, against attention by definition in float64."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal.host import HostKernel
from tests.support.attention.oracle import paged_attention
from tests.support.kernels.arrays import TOLERANCE
from tests.support.kernels.attention_cases import AttentionCase, segments_of
from tests.support.kernels.device import change_device
from vllm_metal_lite.attention.paged.attention import plan_tiles
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels import latent_attention as module
from vllm_metal_lite.kernels.latent_attention import decode_metadata, latent_attention
from vllm_metal_lite.kernels.prefill import TILE_ROWS, VarlenMetadata
from vllm_metal_lite.kernels.served_shapes import attention_problem
from vllm_metal_lite.specs import AttentionShape

pytestmark = pytest.mark.usefixtures("host_or_gpu")

NO_KEYS = mx.zeros((0, 8)), mx.zeros(0)  # block tables and lengths


class Case(AttentionCase):
    def __init__(self, segments, *, heads=5, latent_dim=64, rope=16, **how) -> None:
        super().__init__(segments, heads=(heads, 1), dim=latent_dim, v_dim=rope, **how)
        self.q_pe = self.draw_rows(rope)
        self.how = {"scale": (latent_dim + rope) ** -0.5}

    @property
    def tiles(self) -> np.ndarray:
        return plan_tiles(self.cu_seqlens_q, len(self.q), self.heads[0])

    def run(self, splits: int = 1, tiles: np.ndarray | None = None) -> np.ndarray:
        tiles = self.tiles if tiles is None else tiles
        metadata = (self.block_tables, self.cu_seqlens_q, self.seq_lens, tiles)
        arrays = VarlenMetadata(*map(mx.array, metadata)), self.layer(mx.full(8, 41.0))
        how = {"splits": splits, **self.how}
        q_pe = mx.array(self.q_pe).astype(self.dtype)
        out, ticket = latent_attention(self.queries(), q_pe, *arrays, **how)
        if splits == 1:
            assert ticket.tolist() == [41.0] * 8
        return self.floats(out)

    def expected(self) -> np.ndarray:
        latents, rotary = self.values
        q, keys = np.concatenate([self.q, self.q_pe], -1), np.concatenate([latents, rotary], -1)
        where = self.block_tables, self.cu_seqlens_q, self.seq_lens
        return paged_attention(q, keys, latents, *where, block_size=self.block_size, **self.how)


def check(*args, splits=1, **kwargs) -> None:
    Case(*args, **kwargs).check(splits=splits)


# Segments of one row, of less than a tile of keys, of whole tiles, after a context, and of more
# than one tile.
RAGGED = [(1, 1), (1, 40), (5, 18), (13, 13), (16, 64), (20, 37)]


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_ragged_segments(dtype, splits):
    check(RAGGED, dtype=dtype, splits=splits)


@pytest.mark.parametrize(
    ("heads", "latent_dim", "rope", "dtype"),
    [(20, 512, 64, mx.bfloat16), (16, 512, 64, mx.float16), (40, 256, 32, mx.bfloat16),
     (3, 512, 64, mx.float32), (64, 128, 64, mx.float16), (4, 16, 8, mx.float32),
     (2, 40, 24, mx.bfloat16), (7, 448, 8, mx.bfloat16)],
)  # fmt: skip
def test_the_sizes_of_models(heads, latent_dim, rope, dtype):
    """The sizes are those of GLM 4.7 Flash, DeepSeek V2 Lite, MiniCPM 3, and others."""
    check([(1, 40), (3, 27)], heads=heads, latent_dim=latent_dim, rope=rope, dtype=dtype, padding=1)


@pytest.mark.parametrize("simdgroups", [1, 4, 16])
def test_the_number_of_simdgroups_changes_only_the_order_of_sums(simdgroups, monkeypatch):
    monkeypatch.setattr(module, "latent_simdgroups", lambda *_: simdgroups)
    Case(RAGGED, latent_dim=128, dtype=mx.float16).check(splits=2)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_device_of_few_registers_takes_fewer_simdgroups(splits, monkeypatch):
    """MLX raises if a threadgroup has more threads than the pipeline allows."""
    launched, launch = [], HostKernel.__call__

    def limited(kernel, *, threadgroup, **how):
        launched.append((kernel.name, threadgroup[0]))
        if threadgroup[0] > 448:
            raise ValueError(f"Thread group size ({threadgroup[0]}) is greater than 448")
        return launch(kernel, threadgroup=threadgroup, **how)

    change_device(monkeypatch, latent_simdgroups=16)
    monkeypatch.setattr(HostKernel, "__call__", limited)
    monkeypatch.setattr(module, "_runs", cache(module._runs.__wrapped__))
    case = Case([(1, 40), (3, 27)], heads=20, latent_dim=512, rope=64, dtype=mx.float16)
    for _ in range(2):
        case.check(splits=splits)
    tried = [n for name, n in launched if name == "metal_lite_latent_attention"]
    assert tried == [512, 256, 256]


@pytest.mark.parametrize("heads", [1, 8, 9, 31, 33, 71])
def test_any_number_of_heads(heads):
    check([(1, 9), (3, 12)], heads=heads)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("latent_dim", "rope"), [(512, 64), (64, 16), (40, 24)])
def test_quantised_latents(latent_dim, rope, dtype, bits):
    check([(1, 19), (4, 9)], latent_dim=latent_dim, rope=rope, dtype=dtype, bits=bits)


@pytest.mark.parametrize("block_size", [8, 32])
def test_block_sizes(block_size):
    check(RAGGED, block_size=block_size)


@given(
    st.lists(segments_of(20, 60), min_size=1, max_size=4),
    st.sampled_from([1, 2, 8]),
    st.integers(0, 20),
    st.integers(0, 99),
)
@settings(max_examples=25)
def test_random_segments(segments, splits, padding, seed):
    check(segments, splits=splits, padding=padding, seed=seed)


@pytest.mark.parametrize("split", [1, 7, 32])
def test_in_chunks_a_prompt_gives_the_same_bits_as_at_once(split):
    Case([(45, 45)], padding=0).check_chunks(split, lambda rows, keys: Case([(rows, keys)]))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("heads", [2, 40])
def test_decodes(heads, splits):
    """Decodes are segments of one row with tiles of their own; the last row is padding.  The bits
    are those of one packed step."""
    case = Case([(1, n) for n in (1, 7, 40, 16, 33)], heads=heads, padding=0)
    case.seq_lens[3] = 0
    expected = case.run(splits)
    _, cu_seqlens_q, _, tiles = decode_metadata(*NO_KEYS, 5, heads)
    case.cu_seqlens_q = np.array(cu_seqlens_q)
    np.testing.assert_array_equal(case.run(splits, np.array(tiles)), expected)
    assert not expected[3].any()
    assert expected[4].any()


def test_scores_far_apart_do_not_overflow():
    case = Case(RAGGED)
    case.q *= 1e4
    assert np.isfinite(case.run()).all()


def test_padded_segments_and_a_batch_of_nothing_but_padding():
    Case([(5, 18), (13, 13)], padding=30).check_padding(splits=2)


def test_sizes_that_matrices_cannot_cover_are_named():
    def problem(*dims):
        return attention_problem(AttentionShape(1, 1, *dims, mx.float16, latent=True))

    assert "latent size 96" in problem(96, 64)
    assert "rotary size 12" in problem(512, 12)
    assert problem(576, 64) is not None
    assert problem(512, 72) is not None


@given(st.integers(1, 40), st.integers(1, 130))
def test_every_pair_of_every_decode_is_in_one_tile(rows, heads):
    _, cu_seqlens_q, _, tiles = map(np.array, decode_metadata(*NO_KEYS, rows, heads))
    assert cu_seqlens_q[: rows + 1].tolist() == list(range(rows + 1))
    covered = np.zeros(rows * heads, int)
    for s, first in tiles.tolist():
        if s >= 0:
            covered[s * heads + first : s * heads + min(first + TILE_ROWS, heads)] += 1
    assert (covered == 1).all()
