"""shared_prefix and what paged_decode makes of it, executed on the CPU host, against attention by
definition in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.arrays import TOLERANCE
from tests.support.kernels.attention_cases import PagedSequences
from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.merge_partitions import merge_partitions
from vllm_metal_lite.kernels.shared_prefix import SharedPrefixResult, prefix_splits
from vllm_metal_lite.kernels.store import new_ticket

pytestmark = pytest.mark.usefixtures("host_or_gpu")


class Case(PagedSequences):
    """Rows of `own` keys each behind a prefix, which is in the same blocks; where `own` is negative
    the row has -own keys and no prefix, where it is 0 the row is padding."""

    def __init__(self, own, prefix_len, *, splits=4, **how) -> None:
        own = np.array(own, np.int32)
        self.splits, self.prefix_len = splits, prefix_len
        self.prefix_lens = np.where(own > 0, prefix_len, 0).astype(np.int32)
        super().__init__(abs(own) + self.prefix_lens, **how)

    def draw_blocks(self, block_size: int) -> tuple[np.ndarray, int]:
        """Whole blocks are shared.  If a prefix ends within a block, the rest of that block is not
        read."""
        tables, slots = super().draw_blocks(block_size)
        blocks, having = -(-self.prefix_len // block_size), np.flatnonzero(self.prefix_lens)
        tables[having, :blocks] = tables[having[0], :blocks]
        return tables, slots

    def prefix(self) -> SharedPrefixResult:
        arrays = self.prefix_lens, self.store, new_ticket(), self.splits
        return self.attend_to_prefix(self.queries(), *arrays)

    def run(self) -> np.ndarray:
        prefix = self.prefix()
        return self.floats(self.attend(self.queries(), self.store, prefix.lse, prefix)[0])


# A newcomer and a row of padding before the first that has the prefix; more keys of its own than
# the others together.
ROWS = [-9, 0, 1, 16, 5, -40, 130, 0]


def test_attention_to_the_prefix_alone():
    case = Case(ROWS, 100, heads=(18, 2), splits=4)
    prefix = case.prefix()
    got = np.array(merge_partitions(prefix.partial, prefix.lse, mx.float32))
    case.seq_lens[:] = 100
    case.block_tables[:] = case.block_tables[np.argmax(case.prefix_lens)]
    np.testing.assert_allclose(got, case.expected(), 1e-5, 1e-5)
    assert prefix.partial.shape == (*case.q.shape[:2], 4, 32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("how", [{}, {"softcap": 2.0, "sinks": True}], ids=str)
@pytest.mark.parametrize("plan", [(1, 4), (4, 2)])
def test_prefix_and_own_keys_are_all_keys(plan, how, dtype):
    Case(ROWS, 160, dtype=dtype, plan=plan, **how).check()


@pytest.mark.parametrize(
    ("dim", "v_dim", "dtype"),
    [(64, 64, mx.bfloat16), (72, 72, mx.float16), (80, 80, mx.float32), (128, 64, mx.bfloat16),
     (192, 128, mx.float32), (256, 256, mx.float16), (256, 256, mx.float32)],
)  # fmt: skip
def test_head_dims(dim, v_dim, dtype):
    Case(ROWS[:5], 40, dim=dim, v_dim=v_dim, dtype=dtype, heads=(2, 1), splits=2).check()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("dim", "v_dim", "dtype"),
    [
        (64, 64, mx.bfloat16),
        (72, 72, mx.float16),
        (80, 96, mx.float32),
        (192, 128, mx.float32),
        (256, 256, mx.bfloat16),
    ],
)
def test_quantised_head_dims(dim, v_dim, dtype, bits):
    Case(ROWS, 70, dim=dim, v_dim=v_dim, dtype=dtype, heads=(8, 2), splits=2, bits=bits).check()


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (7, 1), (71, 1)], ids=str)
def test_any_number_of_query_heads_a_kv_head(heads):
    Case(ROWS, 70, heads=heads).check()


@pytest.mark.parametrize("own", [[9, 40], [2100, 30]], ids=str)
def test_more_splits_of_the_prefix_than_splits_of_own_keys_see_at_once(own):
    Case(own, 512, dim=128, heads=(2, 1), splits=16, plan=(2, 4)).check()


@given(
    st.lists(st.integers(-60, 60), max_size=12).map(lambda own: [*own, 3]),
    st.integers(1, 150),
    st.sampled_from([8, 16, 32]),
    st.sampled_from([1, 2, 8, 64]),
    st.sampled_from([(1, 4), (2, 2), (64, 1)]),
    st.integers(0, 9),
)
@settings(max_examples=15)
def test_random_rows(own, prefix_len, block_size, splits, plan, seed):
    Case(
        own, prefix_len, block_size=block_size, splits=splits, plan=plan, seed=seed, sinks=True
    ).check()


def test_scores_far_apart_do_not_overflow():
    case = Case(ROWS, 100, plan=(2, 4))
    case.q *= 1e4
    assert np.isfinite(case.run()).all()


@given(
    st.integers(1, 1024),
    st.sampled_from([(8, 8), (16, 8), (71, 1)]),
    st.integers(1, 1 << 17),
    st.sampled_from(["cpu", "metal", "cuda"]),
)
def test_splits_are_a_power_of_two_within_their_limits(num_rows, heads, prefix_len, where):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "name", lambda: where)
        splits = prefix_splits(num_rows, *heads, prefix_len)
    assert splits in (1, 2, 4, 8, 16, 32, 64)
    assert splits == 1 or prefix_len / splits >= 128
