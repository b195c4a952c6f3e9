"""Conversations to token ids, off the event loop."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_metal_lite.engine.prompts import render_chat
from vllm_metal_lite.server.worker.client import EngineClient

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """What the three chat APIs come to.

    messages: as chat templates want them: role ("system", "user", "assistant", "tool"), content
    (text), tool_calls, ...  template: more variables for the template.
    """

    messages: Sequence[Message]
    template: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True


@dataclass(frozen=True)
class RenderedPrompt:
    """checkpoints: numbers of tokens after which other prompts may go on differently."""

    token_ids: list[int]
    checkpoints: tuple[int, ...] = ()


async def render(engine: EngineClient, conversation: Conversation) -> RenderedPrompt:
    """A conversation under the model's chat template.  Raises RequestError in its words."""
    return await asyncio.to_thread(_render, engine, conversation)


def _render(engine: EngineClient, conversation: Conversation) -> RenderedPrompt:
    token_ids = render_chat(
        engine.tokenizer,
        engine.facts.name,
        list(conversation.messages),
        add_generation_prompt=conversation.add_generation_prompt,
        **conversation.template,
    )
    return RenderedPrompt(token_ids)
