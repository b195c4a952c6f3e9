"""A real server whose model's answers are prepared texts, as the engine would send them."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import pytest

from tests.support.server.kit import Running, serving
from vllm_metal_lite import PoolingParams
from vllm_metal_lite.chat_formats.json_markers import HERMES
from vllm_metal_lite.server.settings import ServerConfig
from vllm_metal_lite.server.worker.client import EngineClient
from vllm_metal_lite.server.worker.messages import Add, Delta
from vllm_metal_lite.server.worker.request_state import RequestState


@dataclass
class Script:
    """The answers of a scripted engine, and the requests that it got.

    texts: the texts of the next answers, `n` for a request; the last one is used again and again.
    size: characters of a delta, which counts as one token.  end: the finish_reason.
    requests: the requests to the engine, in order.
    """

    running: Running
    texts: list[str] = field(default_factory=list)
    size: int = 3
    end: str = "stop"
    requests: list[Add] = field(default_factory=list)

    def says(self, *texts: str, size: int = 3, end: str = "stop") -> None:
        self.texts, self.size, self.end = [*texts], size, end

    def pieces(self) -> list[str]:
        """The deltas of the next answer."""
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        return [text[i : i + self.size] for i in range(0, len(text), self.size)]


def hermes_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def scripted() -> Iterator[Script]:
    """A server, and the script of its answers.  Embeddings are the demo model's."""
    pooled = EngineClient.generate

    @asynccontextmanager
    async def generate(engine, add, on_update=None):
        if isinstance(add.params, PoolingParams):
            async with pooled(engine, add, on_update) as request:
                yield request
            return
        # Only of a request with stop strings does the text come from the engine.
        add = replace(add, params=replace(add.params, stop=["\0"]))
        script.requests.append(add)
        request = RequestState(add, engine.model.tokenizer, on_update)
        engine.requests[add.request_id] = request
        answers = [script.pieces() for _ in range(add.params.n)]
        writing = asyncio.ensure_future(write(request, answers, script.end))
        try:
            yield request
        finally:
            engine.requests.pop(add.request_id)
            writing.cancel()

    async def write(request, answers, end):
        has_scores = request.params.logprobs is not None
        for pieces in zip_longest(*answers):
            deltas = []
            for index, piece in enumerate(pieces):
                if piece is not None:
                    scores = [[(5, -0.5, 1)]] if has_scores else None
                    deltas.append(Delta(index, [5], piece, logprobs=scores))
            request.take(deltas)
            await asyncio.sleep(0)
        request.take([Delta(index, [], "", end) for index in range(len(answers))])

    with pytest.MonkeyPatch.context() as patch, serving(config=ServerConfig(port=0)) as running:
        script = Script(running)
        patch.setattr(EngineClient, "generate", generate)
        running.model.chat_format = HERMES
        yield script
