"""Which drafts came true: the device's count is that of a plain loop over the tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_metal_lite.backend import mx
from vllm_metal_lite.batch.input_batch import InputBatch
from vllm_metal_lite.runner.result import StepResult, count_rejected
from vllm_metal_lite.sampling.sampler import SamplerOutput

TOKENS = st.integers(0, 2)
# A request: its known tokens in the step, its drafts, what its rows sample (-1: no token), and
# whether the step ends with its last known token.
REQUESTS = st.lists(
    st.tuples(
        st.lists(TOKENS, min_size=1, max_size=3),
        st.lists(TOKENS, max_size=4),
        st.lists(st.integers(-1, 2), min_size=5, max_size=5),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


def right_drafts(drafts, sampled):
    count = 0
    while count < len(drafts) and drafts[count] == sampled[count]:
        count += 1
    return count


@given(REQUESTS)
def test_the_rows_that_count_end_at_the_first_wrong_draft(requests):
    inputs, sampled, expected = InputBatch(len(requests), 16, 16), [], []
    requests = sorted(requests, key=lambda r: len(r[0]) + len(r[1]) * r[3] > 1)
    for known, drafts, rows, is_terminal in requests:
        seat = inputs.add([*known] if is_terminal else [*known, 7], len(known))
        inputs.append_blocks(seat, [seat])
        if is_terminal:
            first = len(sampled)
            expected.append(range(first, first + 1 + right_drafts(drafts, rows)))
            sampled += rows[: 1 + len(drafts)]
    drafts = [drafts if is_terminal else [] for _, drafts, _, is_terminal in requests]
    batch = inputs.pack(
        np.arange(len(requests)),
        np.zeros(len(requests), int),
        np.array([len(r[0]) + len(d) for r, d in zip(requests, drafts, strict=True)]),
        drafts=drafts if any(drafts) else None,
    )
    tokens = mx.array(np.array(sampled, np.int32))
    rejected = count_rejected(batch, mx.array(batch.token_ids), tokens)
    assert (rejected is None) == (not any(drafts))
    result = StepResult(batch, SamplerOutput(tokens, None, tokens), rejected=rejected)
    assert result.live_rows == expected
