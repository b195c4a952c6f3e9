"""How a step's decodes and prompts are divided among threadgroups."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kernels.device import pretend_backend
from vllm_metal_lite.attention.paged.attention import plan_tiles
from vllm_metal_lite.attention.paged.decodes import decode_plan
from vllm_metal_lite.kernels.prefill import TILE_ROWS


@given(
    st.integers(1, 1024),
    st.sampled_from([1, 2, 8, 71]),
    st.integers(1, 1 << 17),
    st.sampled_from(["cpu", "metal", "cuda"]),
)
def test_a_plan_is_a_power_of_two_within_its_limits(batch, kv_heads, max_seq_len, where):
    with pytest.MonkeyPatch.context() as patch:
        pretend_backend(patch, where)
        plan = decode_plan(batch, kv_heads, max_seq_len)
    assert plan.splits in (1, 2, 4, 8, 16, 32, 64)
    assert plan.splits == 1 or max_seq_len / plan.splits >= 256
    assert plan.simdgroups in (4, 8)


def test_many_sequences_are_attended_to_by_smaller_threadgroups(monkeypatch):
    pretend_backend(monkeypatch, "cuda")
    assert decode_plan(32, 8, 700) == (1, 8)
    assert decode_plan(64, 8, 700) == decode_plan(64, 8, 4096) == (1, 4)


@given(
    st.lists(st.integers(0, 100), max_size=8), st.integers(0, 70), st.sampled_from([1, 3, 4, 71])
)
def test_every_pair_of_every_row_is_in_one_tile(q_lens, padding, group):
    cu = np.append(0, np.cumsum(q_lens, dtype=np.int32)).astype(np.int32)
    num_rows = int(cu[-1]) + padding
    covered = np.zeros(num_rows * group, int)
    tiles = plan_tiles(cu, num_rows, group)
    for s, first in tiles.tolist():
        start, stop = (0, num_rows) if s < 0 else cu[s : s + 2]
        assert s < 0 or first < (stop - start) * group
        begin = start * group + first
        covered[begin : min(begin + TILE_ROWS, stop * group)] += 1
    assert (covered == 1).all()


def test_the_number_of_tiles_depends_on_shapes_only():
    plans = [
        plan_tiles(np.array(cu, np.int32), 256, 4)
        for cu in ([0, 1, 2, 3], [0, 100, 200, 256], [0, 256, 256, 256], [0, 0, 0, 0])
    ]
    assert len({p.shape for p in plans}) == 1
