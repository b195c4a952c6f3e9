"""The Python API for offline use, with vLLM's names."""

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any

from tqdm import tqdm

from vllm_metal_lite.config import EngineConfig, speculative_options
from vllm_metal_lite.engine.chat_checkpoints import Message
from vllm_metal_lite.engine.engine import LLMEngine
from vllm_metal_lite.engine.interrupt import DeferredInterrupt
from vllm_metal_lite.engine.one_thread import held
from vllm_metal_lite.engine.pooling import checked
from vllm_metal_lite.engine.prompt_ids import Prompt, as_list, is_list, text_or_ids
from vllm_metal_lite.engine.scoring import plan_scores
from vllm_metal_lite.errors import ModelLoadError, RequestError, one_line, show
from vllm_metal_lite.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from vllm_metal_lite.pooling_params import PoolingParams
from vllm_metal_lite.sampling_params import SamplingParams

# Seconds after the answers in which an engine may still copy prefixes to the disk.
_LONGEST_REST = 2.0


class LLM:
    """A model and its engine, with blocking calls, for one thread at a time: others are refused.

    model: "demo" (shipped in the package), a local folder or a Hugging Face name.  The other
    options are EngineConfig's, and vLLM's `speculative_config` (`speculative_options`).  Raises
    ModelLoadError, ConfigError or OutOfMemoryError.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        if (how := options.pop("speculative_config", None)) is not None:
            options |= speculative_options(how)
        self.engine = LLMEngine.from_name(model, EngineConfig(**options))
        if how and how.get("method") == "mtp" and self.engine.model.drafter is None:
            raise ModelLoadError(f"{model}: no trained head in its folder that could be read")
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        checkpoints: Sequence[int] | Sequence[Sequence[int]] = (),
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete the prompts; returns one RequestOutput per prompt, in order.

        prompts: text, token ids, a dict with "prompt" or "prompt_token_ids" and perhaps
        "cache_salt" and "spans" (see `LLMEngine.add_request`), or a list of these.
        sampling_params: one for all, or one per prompt; None: `get_default_sampling_params`.
        checkpoints: numbers of tokens after which later prompts may continue differently (see
        `LLMEngine.add_request`), for all prompts, or a list per prompt.
        If a prompt can never be served, raises RequestError with its index before computing
        anything.  A request whose own steps fail ends with `error`, and no other request does.
        """
        batch = as_list(prompts)
        params = _one_each(sampling_params, len(batch), "sampling_params")
        priorities = _one_each(priority, len(batch), "priority")
        is_nested = is_list(checkpoints) and any(map(is_list, checkpoints))
        kept = _one_each(
            checkpoints if is_nested else (checkpoints,) * len(batch), len(batch), "checkpoints"
        )

        ids: list[str] = []
        with held(self.engine.lock):
            try:
                for i, prompt in enumerate(batch):
                    request_id = str(next(self._ids))
                    how: dict[str, Any] = {"priority": priorities[i], "checkpoints": kept[i]}
                    try:
                        self.engine.add_request(request_id, prompt, params[i], **how)
                    except RequestError as e:
                        where = f"prompt {i}: " if len(batch) > 1 else ""
                        raise RequestError(where, *e.parts) from None
                    ids.append(request_id)
                return self._run(ids, use_tqdm)
            finally:
                self.engine.abort(ids)  # any that an error or Ctrl-C left unfinished

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, using the model's chat template.

        Content may be a list of parts: {"type": "text", "text": ...}, and for a model that sees
        {"type": "image_url", "image_url": {"url": "data:..."}} or {"type": "image_pil",
        "image_pil": a picture}, see docs/images.md.
        """
        kwargs = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
            raise RequestError(
                f"chat_template_kwargs must be a dict with names as keys, got {show(kwargs)}"
            )
        # Anything but a list of lists is one conversation, which render_turn validates.
        is_many = is_list(messages) and any(map(is_list, messages))
        many: Sequence[Any] = messages if is_many else [messages]
        options = {"add_generation_prompt": add_generation_prompt, **kwargs}
        prompts, checkpoints = [], []
        for conversation in many:
            prompt, positions = self.engine.render_turn(conversation, **options)
            prompts.append(prompt)
            checkpoints.append(positions)
        return self.generate(prompts, sampling_params, checkpoints=checkpoints, use_tqdm=use_tqdm)

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
        batch = [_with_prefix(before, prompt) for prompt in as_list(prompts)]
        return [
            EmbeddingRequestOutput(
                done.request_id,
                done.prompt_token_ids,
                done.num_cached_tokens,
                checked(done.pooled, params).tolist(),
            )
            for done in self._pool(batch, params, use_tqdm)
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
        """How well each pair of texts matches, in order.

        texts_1: the queries: one for all documents, or one each.  texts_2: the documents.
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
        done = self._pool(list(plan.prompts), plan.params, use_tqdm)
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

    def metrics(self) -> dict[str, int]:
        """Counters since the engine was created, and the current block counts."""
        return self.engine.metrics()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a call without any, see `LLMEngine`."""
        return self.engine.get_default_sampling_params()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.engine.model.tokenizer

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        with held(self.engine.lock):
            self.engine.reset_prefix_cache()

    def _pool(self, prompts: Sequence[Prompt], params: Any, use_tqdm: bool) -> list[RequestOutput]:
        """The finished requests of the prompts.  params: PoolingParams."""
        # The shortest go first: attention pads the prompts of a step to one length.
        lengths = [_length(prompt) for prompt in prompts]
        done = self.generate(prompts, params, priority=lengths, use_tqdm=use_tqdm)
        for i, output in enumerate(done):
            if (error := output.outputs[0].error) is not None:
                raise RequestError(f"prompt {i}: {error}")
        return done

    def _run(self, ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        with (
            DeferredInterrupt() as interrupt,
            tqdm(total=len(ids), disable=not use_tqdm, desc="prompts", unit="prompt") as bar,
        ):
            while len(done) < len(ids):
                for output in self._step():
                    if output.finished:
                        done[output.request_id] = output
                        bar.update()
                if interrupt.pressed:
                    raise KeyboardInterrupt
            until = time.monotonic() + _LONGEST_REST
            while time.monotonic() < until and self.engine.rest() and not interrupt.pressed:
                pass
            if interrupt.pressed:
                raise KeyboardInterrupt
        return [done[i] for i in ids]

    def _step(self) -> list[RequestOutput]:
        """Run a step; returns the requests that got a token.  If it fails, returns those that end
        with its error."""
        try:
            return self.engine.step()
        except Exception as e:
            lost = self.engine.requests_at_fault
            ended = self.engine.abort(lost, f"a step of the engine failed: {one_line(e)}")
            if self.engine.failed_steps.is_hopeless or len(ended) < len(lost):
                raise
            return ended


def _one_each(value: Any, count: int, name: str) -> list:
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{len(value)} {name} for {count} prompts: give one for all or one each")
    return list(value)


def _length(prompt: Prompt) -> int:
    with suppress(RequestError):  # `generate` refuses the prompt, and names its index
        return len(text_or_ids(prompt))
    return 0


def _checked_params(params: PoolingParams | None) -> PoolingParams:
    if params is not None and not isinstance(params, PoolingParams):
        raise RequestError(f"pooling_params must be PoolingParams, got {show(params)}")
    return params or PoolingParams()


def _with_prefix(before: str, prompt: Prompt) -> Prompt:
    """A prompt with a text before its text; token ids stay as they are."""
    if isinstance(prompt, str):
        return before + prompt
    if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
        return {**prompt, "prompt": before + prompt["prompt"]}
    return prompt
