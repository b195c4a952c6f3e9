"""Prompts that are texts or token ids, of completions and of pooling requests."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from vllm_metal_lite.engine.prompt_ids import encode, tokenize
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.server.conversations import encode_prompt
from vllm_metal_lite.server.errors import ApiError, must_be
from vllm_metal_lite.server.model_text import ModelText
from vllm_metal_lite.server.offload import check_wanted
from vllm_metal_lite.server.worker.request_state import RequestState

Prompt = str | list[int]
_SHORT = 1 << 16  # a shorter text is encoded as a whole, whatever its tokens


def split_prompts(prompt: Any, param: str = "prompt", ids: bool = True) -> list[Prompt]:
    """The prompts of a request: a text, token ids, or a list of either.  Raises ApiError (400).

    ids: whether token ids are allowed.
    """
    one = "a text or token ids" if ids else "a text"
    prompts = [prompt] if isinstance(prompt, str) or (ids and _are_ids(prompt)) else prompt
    if not isinstance(prompts, list) or not prompts:
        raise must_be(param, f"{one}, or a list of at least one", prompt)
    for i, item in enumerate(prompts):
        if not isinstance(item, str) and not (ids and _are_ids(item)):
            raise must_be(f"{param}.{i}", one, item)
    return prompts


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def token_ids_of(
    prompts: Sequence[Prompt], model: ModelText, special: bool, param: str
) -> list[list[int]]:
    """Token ids of the prompts of a field.  Raises ApiError (400)."""
    places = places_of(param, prompts)
    return [token_ids(p, model, special, at) for p, at in zip(prompts, places, strict=True)]


def token_ids(
    prompt: Prompt, model: ModelText, special: bool, where: str, cut: bool = False
) -> list[int]:
    """Token ids of a prompt.  Raises ApiError (400), which names the place.

    cut: the caller wants only as many tokens as the context has, however long the text is.
    """
    check_wanted()
    try:
        if isinstance(prompt, str) and cut:
            prompt = encode(_beginning(prompt, model), model.tokenizer, add_special_tokens=special)
        elif isinstance(prompt, str):
            prompt = encode_prompt(model, prompt, special)
        return tokenize(prompt, None, model.facts.vocab_size)[1]
    except RequestError as e:
        raise ApiError(400, f"{where}: {e}", param=where) from None


def _beginning(text: str, model: ModelText) -> str:
    """The beginning of a text, of at least two contexts if the text has as many.  Its tokens are
    those of the whole text, but for some at its end."""
    size = _SHORT
    while size < len(text):
        if len(encode(text[:size], model.tokenizer)) >= 2 * model.facts.max_model_len:
            return text[:size]
        size *= 2
    return text


def places_of(field: str, values: Any) -> list[str]:
    """The places of a field's texts, for errors: `input`, or `input.0`, `input.1`, ..."""
    if isinstance(values, str) or len(values) == 1:
        return [field]
    return [f"{field}.{i}" for i in range(len(values))]


async def all_of(
    starts: Iterable[Coroutine[Any, Any, RequestState]], most: int
) -> list[RequestState]:
    """The results, in order.  If one start fails, the others are cancelled.

    most: the largest number of starts that run at once.
    """
    free, tasks = asyncio.Semaphore(most), []
    try:
        async with asyncio.TaskGroup() as running:
            for start in starts:
                await free.acquire()
                tasks.append(running.create_task(start))
                tasks[-1].add_done_callback(lambda _: free.release())
                await asyncio.sleep(0)  # one start at a time: the event loop serves others between
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
