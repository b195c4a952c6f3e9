"""Prompts that are texts or token ids, of completions and of pooling requests."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from vllm_metal_lite.engine.prompt_ids import tokenize
from vllm_metal_lite.errors import RequestError
from vllm_metal_lite.server.conversations import encode_prompt
from vllm_metal_lite.server.errors import ApiError, must_be
from vllm_metal_lite.server.text_model import TextModel
from vllm_metal_lite.server.worker.request_state import RequestState

Prompt = str | list[int]


def split_prompts(prompt: Any, param: str = "prompt") -> list[Prompt]:
    """The prompts of a request: a text, token ids, or a list of either.  Raises ApiError (400)."""
    if isinstance(prompt, str) or _are_ids(prompt):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise must_be(param, "a text, token ids, or a list of them", prompt)
    for i, item in enumerate(prompt):
        if not isinstance(item, str) and not _are_ids(item):
            raise must_be(f"{param}.{i}", "a text or token ids", item)
    return prompt


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def token_ids_of(
    prompts: Sequence[Prompt], model: TextModel, special: bool, param: str
) -> list[list[int]]:
    def ids_of(prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            prompt = encode_prompt(model, prompt, special)
        return tokenize(prompt, None, model.facts.vocab_size)[1]

    try:
        return [ids_of(prompt) for prompt in prompts]
    except RequestError as e:
        raise ApiError(400, str(e), param=param) from None


async def all_of(starts: Iterable[Coroutine[Any, Any, RequestState]]) -> list[RequestState]:
    """The results, in order.  If one fails, none is left running."""
    try:
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(start) for start in starts]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
