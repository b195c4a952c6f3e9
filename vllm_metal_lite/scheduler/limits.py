"""Refuses requests that could never finish."""

from vllm_metal_lite.errors import Option, RequestError, show
from vllm_metal_lite.scheduler.kv_manager import KVCacheManager
from vllm_metal_lite.scheduler.request import Request


def longest(request: Request, max_model_len: int, kv: KVCacheManager) -> int:
    """The most tokens that a request may reach, its prompt included.

    Raises RequestError, with the numbers, if the request could never finish: it has no room for a
    token, or needs more blocks than the store has.
    """
    name, prompt = f"request {show(request.request_id)}", request.num_prompt_tokens
    room = max_model_len + request.only_reads
    if prompt >= room:
        raise RequestError(
            f"{name} has a prompt of {prompt} tokens; ",
            Option("max_model_len"),
            f" ({max_model_len}) leaves room for {room - 1}",
            "" if request.only_reads else " and a new one",
        )
    # The last token sampled is never computed, so it is never stored.
    max_length = min(prompt + request.max_tokens, room)
    num_stored = max_length - 1
    size = f"{prompt} prompt tokens + max_tokens {request.max_tokens}"
    if sizes := kv.too_large(num_stored):
        raise RequestError(
            f"{name} ({size}) needs {sizes[0]} blocks of {kv.block_size} tokens; "
            f"the store has {sizes[1]}"
        )
    return max_length
