"""Refuses requests that could never finish."""

from collections.abc import Callable

from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import Option, RequestError, show
from vllm_metal_lite.scheduler.kv_manager import KVCacheManager
from vllm_metal_lite.scheduler.request import Request


def longest(request: Request, max_model_len: int, kv: KVCacheManager) -> int:
    """The most tokens that a request may reach, its prompt included.

    Raises RequestError, with the numbers, if the request could never finish: it has no room for a
    token, or needs more blocks than the store has, its spans included.
    """
    prompt, room = request.num_prompt_tokens, max_model_len + request.only_reads
    if prompt >= room:
        raise RequestError(
            f"request {show(request.request_id)} has a prompt of {prompt} tokens; ",
            Option("max_model_len"),
            f" ({max_model_len}) leaves room for {room - 1}",
            "" if request.only_reads else " and a new one",
        )
    # The last token sampled is never computed, so it is never stored.
    max_length = min(prompt + request.max_tokens, room)
    if sizes := kv.too_large(max_length - 1, request.spans):
        size = f"{prompt} prompt tokens + max_tokens {request.max_tokens}"
        if request.spans:
            size += f", spans of up to {max(end - start for start, end in request.spans)} tokens"
        raise RequestError(
            f"request {show(request.request_id)} ({size}) needs {sizes[0]} blocks of "
            f"{kv.block_size} tokens; the store has {sizes[1]}"
        )
    return max_length


def check_spans(
    request: Request, config: EngineConfig, max_num_new_tokens: Callable[[Request, int], int]
) -> None:
    """Raise RequestError, with the numbers, if a span of a request can never be computed in one
    step.

    max_num_new_tokens: how many tokens from a position on an otherwise empty step computes.
    """
    for start, end in request.spans:
        most = max_num_new_tokens(request, start)
        if end - start > most:
            limits: dict[int, Option | str] = {request.max_chunk: "prompt_logprobs"}
            for name in ("long_prefill_token_threshold", "max_num_batched_tokens"):
                limits[getattr(config, name)] = Option(name)
            raise RequestError(
                f"request {show(request.request_id)} has a span from {start} to {end}, "
                f"{end - start} tokens; a step computes at most {most} of them (",
                limits.get(most, f"behind a context of {start} tokens"),
                ")",
            )
