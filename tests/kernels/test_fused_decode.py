"""Decodes in one launch, with norm, rotation and K/V write, on the CPU host: against rope_write and
paged_decode one after the other, and against attention in float64.

The store must hold the same bits afterwards; attention differs by the order in which it adds up.
The new slot holds NaN before the write.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine.batches import pack
from tests.support.kernels.arrays import STORE, raw
from tests.support.kernels.attention_cases import RAGGED, PagedSequences
from tests.support.kernels.new_rows_cases import NewRowsCase
from vllm_metal_lite.attention.paged.attention import KernelAttention
from vllm_metal_lite.attention.paged.decodes import reads_new_rows
from vllm_metal_lite.attention.pending_heads import Heads
from vllm_metal_lite.backend import mx
from vllm_metal_lite.checks.case import TimedStore
from vllm_metal_lite.checks.new_rows import new_rows
from vllm_metal_lite.kernels.rope_write import rope_write
from vllm_metal_lite.kernels.store import LayerStore, new_ticket
from vllm_metal_lite.specs import AttentionShape, RopeShape

pytestmark = pytest.mark.usefixtures("host")
WRITTEN = STORE

# The allowed difference of fused and unfused: rounding of the result, and other orders of sums.
TOLERANCE = {mx.float32: (1e-5, 1e-5), mx.float16: (1e-3, 1e-3), mx.bfloat16: (8e-3, 8e-3)}
SEQUENCE = ("window", "softcap", "sinks", "plan", "block_size", "bits")


class Case:
    """Sequences whose newest tokens are not in the store, and the rows of those tokens.

    shift: what is added to the number of earlier tokens to get the position of each row, as behind
    pictures.
    """

    def __init__(self, seq_lens, *, heads=(4, 2), dims=(32, 32), dtype=mx.float32, seed=0, **how):
        shift = how.pop("shift", 0)
        sequence = {name: how.pop(name) for name in SEQUENCE if name in how}
        self.prefix_len = how.pop("prefix_len", 0)
        self.sequences = PagedSequences(
            seq_lens, heads=heads, dim=dims[0], v_dim=dims[1], dtype=dtype, seed=seed, **sequence
        )
        newest, size = np.maximum(np.array(seq_lens) - 1, 0), self.sequences.block_size
        blocks = self.sequences.block_tables[np.arange(len(newest)), newest // size]
        slots = np.where(np.array(seq_lens) > 0, blocks * size + newest % size, -1)
        drawn = {"heads": heads, "dims": dims, "dtype": dtype, "seed": seed, "rotated": dims[0]}
        positions = newest + shift
        self.rows = NewRowsCase(positions, slots=slots.astype(np.int32), **(drawn | how))

    def run(self, fused: bool) -> list[mx.array]:
        """The attention, and the keys and values in the store after the launch."""
        s, rows = self.sequences, self.rows
        empty = np.zeros(s.store[0].shape[0], bool)
        empty[rows.slots[rows.slots >= 0]] = True
        poison = float("nan") if s.spec.bits is None else 0xFFFFFFFF
        store = [
            mx.where(mx.array(empty)[:, None, None], poison, a).astype(a.dtype) for a in s.store
        ]
        mx.eval(store)
        q, ticket, prefix = rows.new_rows, new_ticket(), None
        if not fused:
            layer = LayerStore(*store, ticket, s.spec)
            q, ticket = rope_write(q, mx.array(rows.slots), layer)
        if self.prefix_len:  # only of the longest sequence: what is not shared is the same
            lens = np.zeros(len(s.seq_lens), np.int32)
            lens[np.argmax(s.seq_lens)] = self.prefix_len
            prefix = s.attend_to_prefix(q, lens, store, ticket)
            ticket = prefix.lse
        out, ticket = s.attend(q, store, ticket, prefix)
        mx.eval(out, ticket)
        return [out, *store]

    def check(self) -> None:
        (got, *store), (expected, *wanted) = self.run(True), self.run(False)
        for array, right in zip(store, wanted, strict=True):
            np.testing.assert_array_equal(raw(array), raw(right))
        assert got.dtype == expected.dtype == self.rows.dtype
        got, expected = (np.array(a.astype(mx.float32)) for a in (got, expected))
        assert np.isfinite(expected).all()
        assert np.isfinite(got).all()
        atol, rtol = TOLERANCE[self.rows.dtype]
        np.testing.assert_allclose(got, expected, rtol, atol)

    def expected(self) -> np.ndarray:
        """Attention in float64 to the store with the new rows."""
        s, rows = self.sequences, self.rows
        s.q, written = rows.rotated("q"), rows.slots >= 0
        for stored, new in zip(s.values, (rows.rotated("k"), rows.v), strict=True):
            stored[rows.slots[written]] = new[written]
        return s.expected()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("plan", [(1, 8), (4, 4)], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (18, 1)], ids=str)
def test_heads_and_splits(heads, plan, dtype):
    """A KV head has one tile of query heads, or two tiles of nine heads."""
    Case(RAGGED, heads=heads, dims=(128, 128), plan=plan, dtype=dtype).check()


@pytest.mark.parametrize(
    "dims", [(8, 8), (72, 72), (80, 40), (64, 96), (192, 128), (256, 256), (576, 512)], ids=str
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_head_sizes(dims, dtype):
    Case(RAGGED, dims=dims, rotated=dims[0] // 4 * 2, plan=(2, 8), dtype=dtype).check()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("dims", "heads", "dtype", "how"),
    [
        ((256, 256), (8, 4), mx.bfloat16, {"window": 17}),  # Gemma 3
        ((64, 64), (16, 2), mx.bfloat16, {"window": 9, "sinks": True, "norms": ""}),  # gpt-oss
        ((128, 128), (18, 1), mx.float16, {"rotated": 64, "plan": (4, 4)}),
        ((72, 40), (4, 2), mx.float32, {"traditional": True, "plan": (1, 1)}),
        ((576, 512), (4, 1), mx.bfloat16, {"rotated": 64}),
        ((128, 128), (8, 2), mx.bfloat16, {"prefix_len": 70, "plan": (2, 4)}),
    ],
    ids=str,
)
def test_a_quantised_store(dims, heads, dtype, how, bits):
    """Both ways write the same bits, because a row is quantised before attention reads it."""
    Case(RAGGED, dims=dims, heads=heads, dtype=dtype, bits=bits, **how).check()


@pytest.mark.parametrize(
    "how",
    [
        {"traditional": True, "rotated": 12},
        {"rotated": 0},
        {"freqs": True, "scale": 0.5},
        {"rotated": 8, "freqs": True},  # MLX passes so few frequencies as `constant`
        {"norms": ""},
        {"norms": "QK"},
        {"norms": "k"},
        {"weight_dtype": mx.float32, "dtype": mx.bfloat16},
        {"joined": False},
        {"factor": 1.3466, "rotated": 12, "freqs": True},
        {"factor": 1.3466, "dtype": mx.bfloat16, "bits": 8, "norms": ""},
    ],
    ids=str,
)
def test_every_way_of_rotating(how):
    Case(RAGGED, **how).check()


# The last turn of a split is not full; a SIMD group holds 8, 8 and 2 queries.
OF_SIZES = [
    {"dims": (128, 128), "rotated": 64, "heads": (8, 2), "dtype": mx.bfloat16},
    {"dims": (72, 40), "rotated": 36, "heads": (18, 1), "dtype": mx.float16},
    {"dims": (256, 256), "rotated": 128, "heads": (4, 4)},
]


@pytest.mark.parametrize(
    "how",
    [
        {"traditional": True, "rotated": 12},
        {"freqs": True, "scale": 0.5},
        {"norms": ""},
        {"factor": 1.3466, "rotated": 12},
        *({**sizes, "plan": (2, 4), "sinks": True} for sizes in OF_SIZES),
    ],
    ids=str,
)
def test_behind_a_prefix(how):
    Case(RAGGED, prefix_len=70, **how).check()


# Behind pictures


SHIFTS = [0, -5, 0, -30, 3, -60]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"window": 17, "sinks": True, "plan": (4, 4)},
        {"prefix_len": 70, "plan": (2, 4)},
        {"freqs": True, "rotated": 16, "traditional": True},
    ],
    ids=str,
)
def test_rows_at_other_positions(how):
    """Each sequence has its own shift; what a row sees still depends on its number of keys."""
    case, unshifted = Case(RAGGED, shift=SHIFTS, **how), Case(RAGGED, **how)
    case.check()
    got = np.array(case.run(True)[0])
    np.testing.assert_allclose(got, case.expected(), 1e-5, 1e-5)
    far = np.abs(got - np.array(unshifted.run(True)[0])).max((1, 2)) > 1e-3
    assert far.tolist() == [shift != 0 for shift in SHIFTS]


def test_a_step_rotates_by_its_rotary_positions():
    """The plan of a step behind pictures is that of other decodes, but for the positions."""
    shape, rope = AttentionShape(4, 2, 32, 32, mx.float32), RopeShape(32, base=1e4, eps=1e-6)
    load, shifted = TimedStore(shape, 3, 20), np.array([19, 4, 11], np.int32)
    new, _ = new_rows(shape, shifted, rope)
    parts = (new.q, 4, new.q_norm), (new.k, 2, new.k_norm)
    heads = [Heads(rows, count, 32, norm, new.rope) for rows, count, norm in parts]
    heads = (*heads, Heads(new.v, 2, 32))
    plain = np.array(load.attention()(heads))
    load.batch = replace(load.batch, rotary_positions=shifted)
    fused = np.array(load.attention()(heads))
    keys = np.array(load.store.keys[0])
    unfused = np.array(load.attention(without="fused_decode")(heads))
    np.testing.assert_array_equal(keys, np.array(load.store.keys[0]))
    np.testing.assert_allclose(fused, unfused, 1e-5, 1e-5)
    assert (np.abs(fused - plain).max((1, 2)) > 1e-3).tolist() == [False, True, True]
    for padding in (0, 5):
        step = KernelAttention(load.store, "gather", [shape]).prepare(load.batch, 3 + padding)
        assert step.plan.fused
        assert step.plan.repeats
        assert step.plan.positions.tolist() == [19, 4, 11] + [0] * 5


# What queries see


@pytest.mark.parametrize("plan", [(1, 4), (4, 2), (2, 1)], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {"window": 1},
        {"window": 17, "sinks": True},
        {"softcap": 2.0},
        {"window": 9, "softcap": 2.0, "sinks": True, "block_size": 8},
    ],
    ids=str,
)
def test_what_queries_see(how, plan):
    Case(RAGGED, plan=plan, **how).check()


@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=5),
    st.sampled_from([(1, 1), (6, 2), (24, 2)]),
    st.sampled_from([8, 16]),
    st.sampled_from([None, 13]),
    st.booleans(),
    st.sampled_from([(1, 8), (2, 2), (64, 1)]),
    st.integers(0, 9),
)
@settings(max_examples=12)
def test_random_sequences(seq_lens, heads, block_size, window, sinks, plan, seed):
    how = {"plan": plan, "seed": seed}
    Case(seq_lens, heads=heads, block_size=block_size, window=window, sinks=sinks, **how).check()


def test_rows_of_padding_give_zeros_and_write_nothing():
    out, *store = Case([0, 0, 0], plan=(2, 4), sinks=True).run(True)
    assert not np.array(out).any()
    assert all(np.isnan(np.array(a)).all() for a in store)


# Steps in which a row sees the new row of another


@pytest.mark.parametrize(
    ("seq_lens", "tables", "reads"),
    [
        ((16, 17), ([0, 1], [0, 1, 2]), True),  # the block that the first row completes
        ((17, 16), ([0, 1, 2], [0, 1]), True),
        ((16, 17), ([0, 1], [0, 3, 2]), False),
        ((16, 16), ([0, 1], [0, 3]), False),
        ((24, 17), ([0, 1, 2], [0, 1, 3]), False),  # a block that was complete before
        ((15, 17), ([0, 1], [0, 3, 2]), False),
        ((9,), ([0, 1],), False),
    ],
)
def test_blocks_shared_at_once_are_seen(seq_lens, tables, reads):
    decodes = [(length - 1, 1) for length in seq_lens]
    assert reads_new_rows(pack(decodes, tables)) is reads
    apart = [[10 * i + b for b in t] for i, t in enumerate(tables, 1)]
    assert reads_new_rows(pack(decodes, apart)) is False
    assert reads_new_rows(pack(decodes, apart, tables)) is reads
