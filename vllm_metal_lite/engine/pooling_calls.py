"""The calls of `LLM` that generate no text: embeddings and scores."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any

from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.engine.pooling import checked
from vllm_metal_lite.engine.prompt_ids import Prompt, as_list, text_or_ids
from vllm_metal_lite.engine.scores import plan_scores
from vllm_metal_lite.errors import RequestError, show
from vllm_metal_lite.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from vllm_metal_lite.pooling_params import PoolingParams


class PoolingCalls:
    """Base of `LLM`, which has the engine and `generate`."""

    engine: LLMEngine
    generate: Callable[..., list[RequestOutput]]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        prompt_name: str | None = None,
        use_tqdm: bool = False,
    ) -> list[EmbeddingRequestOutput]:
        """The embeddings of texts or token ids, in order.

        prompt_name: the model's prompt ("query", "document", ...) to put before each text; None:
        its default, if it has one.
        Raises RequestError, with the index of a prompt that can never be served.
        """
        params = _checked_params(pooling_params)
        before = self.engine.model.pooling.prompt(prompt_name)
        batch = [_behind(before, prompt) for prompt in as_list(prompts)]
        return [
            EmbeddingRequestOutput(
                done.request_id,
                done.prompt_token_ids,
                done.num_cached_tokens,
                checked(done.pooled, params).tolist(),
            )
            for done in self._read(batch, params, use_tqdm)
        ]

    def score(
        self,
        texts_1: str | Sequence[str],
        texts_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        instruction: str | None = None,
        use_tqdm: bool = False,
    ) -> list[ScoringRequestOutput]:
        """How well each pair of texts matches, in order: one text for all, or one each.

        A reranker gives the probability that the second text answers the first; other models give
        the cosine of two embeddings.
        instruction: what the reranker judges.
        """
        model = self.engine.model
        params = _checked_params(pooling_params)
        plan = plan_scores(
            model.pooling,
            model.tokenizer,
            texts_1,
            texts_2,
            params,
            self.engine.max_model_len,
            instruction,
        )
        done = self._read(plan.prompts, plan.params, use_tqdm)
        values = [checked(output.pooled, plan.params) for output in done]
        return [ScoringRequestOutput(i, score) for i, score in enumerate(plan.scores(values))]

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, **options: Any
    ) -> list[ScoringRequestOutput]:
        """The documents' indexes and scores, the best first.

        top_n: 0 or None: all.  options: those of `score`.
        """
        is_count = isinstance(top_n, Integral) and not isinstance(top_n, bool) and top_n >= 0
        if top_n is not None and not is_count:
            raise RequestError(f"top_n must be an integer of at least 0, got {show(top_n)}")
        scores = self.score(query, documents, **options)
        return sorted(scores, key=lambda output: -output.score)[: top_n or None]

    def _read(
        self, prompts: Sequence[Prompt], params: PoolingParams, use_tqdm: bool
    ) -> list[RequestOutput]:
        # The shortest goes first: attention pads the prompts of a step to like lengths.
        lengths = [_length(prompt) for prompt in prompts]
        return self.generate(prompts, params, priority=lengths, use_tqdm=use_tqdm)


def _length(prompt: Prompt) -> int:
    with suppress(RequestError):  # `generate` refuses the prompt, with its index
        return len(text_or_ids(prompt))
    return 0


def _checked_params(params: PoolingParams | None) -> PoolingParams:
    if params is not None and not isinstance(params, PoolingParams):
        raise RequestError(f"pooling_params must be PoolingParams, got {show(params)}")
    return params or PoolingParams()


def _behind(before: str, prompt: Prompt) -> Prompt:
    """A prompt with a text before its text; token ids stay as they are."""
    if isinstance(prompt, str):
        return before + prompt
    if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
        return {**prompt, "prompt": before + prompt["prompt"]}
    return prompt
