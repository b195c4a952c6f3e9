"""Rows whose logits allow no token: marked on the device, explained on the host.

The mark replaces the token, so the host sees it without an extra wait.  The device continues with
the unmarked token, which is never shown.
"""

from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import NOT_FINITE
from vllm_metal_lite.sampling.logits import fused
from vllm_metal_lite.sampling_params import SamplingParams

# What replaces a token: MASKED if all of the row's logits are -inf, NAN if the best is NaN.
MASKED, NAN = -2, -3


def mark(x: mx.array, token_ids: mx.array) -> mx.array:
    """(T,) int32: token_ids, the argmax of x (T, V), with MASKED or NAN where no token is valid.

    Two launches on a GPU, which read one value per row.
    """
    return _mark(mx.take_along_axis(x, token_ids[:, None], -1).squeeze(-1), token_ids)


@fused
def _mark(best: mx.array, token_ids: mx.array) -> mx.array:
    return mx.where(best > -mx.inf, token_ids, mx.where(best == -mx.inf, MASKED, NAN))


def why(
    reason: int,
    params: SamplingParams,
    num_generated: int,
    has_grammar: bool = False,
    grammar_error: str = "",
) -> str:
    """Why a row is MASKED or NAN (`reason`) after num_generated tokens, in one line."""
    if grammar_error:
        return f"no token can be sampled: the grammar failed: {grammar_error}"
    if reason == NAN:
        return f"no token can be sampled: the model's logits are NaN ({NOT_FINITE})"
    rules = {
        "the grammar": has_grammar,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words,
        "min_tokens (no stop token may come before it)": params.min_tokens > num_generated,
    }
    named = " and ".join(name for name, applies in rules.items() if applies)
    cause = f"all are excluded by {named}" if named else "the model's logits are all -inf"
    return f"no token can be sampled: {cause}"
