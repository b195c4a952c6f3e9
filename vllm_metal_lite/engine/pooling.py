"""Validates pooling parameters and results.

The scheduler sees a request of one token, which ends as soon as its prompt is computed.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from vllm_metal_lite.errors import NOT_FINITE, Option, RequestError
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.pooling_params import PoolingParams
from vllm_metal_lite.sampling_params import SamplingParams

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def resolved(params: PoolingParams, model: LoadedModel) -> PoolingParams:
    """The parameters with the model's own pooling where they name none.

    Raises RequestError if the model cannot follow them.
    """
    if (problem := model.no_embeddings) is not None:
        raise RequestError(f"{model.name} gives no embeddings: {problem}")
    ids = params.score_token_ids or (0,)
    if len(ids) > model.vocab_size:
        words = f" may have at most {model.vocab_size} entries, got {len(ids)}"
        raise RequestError(Option("score_token_ids"), words)
    if (most := max(ids)) >= model.vocab_size:
        raise RequestError(f"token id {most} is outside the vocabulary of {model.vocab_size}")
    return _replaced(params, pooling=params.pooling or model.pooling.pooling)


_replaced = lru_cache(maxsize=8)(replace)  # slow, as it validates all fields; requests share it


def checked(pooled: np.ndarray | None, params: PoolingParams) -> np.ndarray:
    """The values of a finished request, float32.  Raises RequestError if they are of no use."""
    if pooled is None or not np.isfinite(pooled).all():
        raise RequestError(f"the model computes no finite values for this prompt ({NOT_FINITE})")
    asked = params.dimensions or 0
    if len(pooled) < asked and params.score_token_ids is None:
        raise RequestError(Option("dimensions"), f" must be at most {len(pooled)}, got {asked}")
    return pooled


def truncate(
    token_ids: Sequence[int], params: PoolingParams, max_model_len: int, ends: Sequence[int] = ()
) -> list[int]:
    """The first tokens of a prompt, as many as `truncate_prompt_tokens` allows.

    ends: the special tokens that a tokenizer puts around a text.  The prompt keeps those at its
    end.
    """
    most = params.truncate_prompt_tokens
    if most is None:
        return list(token_ids)
    most = max_model_len if most < 0 else min(most, max_model_len)
    if len(token_ids) <= most:
        return list(token_ids)
    suffixes = [list(ends[i:]) for i in range(len(ends))]
    kept = next((s for s in suffixes if list(token_ids[-len(s) :]) == s), [])[-most:]
    return [*token_ids[: most - len(kept)], *kept]
