"""How well pairs of texts match: by a reranker's "yes", or by the cosine of two embeddings."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm_metal_lite.engine.pooling import truncate
from vllm_metal_lite.engine.prompt_ids import Prompt, encode
from vllm_metal_lite.errors import RequestError, show
from vllm_metal_lite.model.files.pooling_config import PoolingConfig
from vllm_metal_lite.pooling_params import PoolingParams

# The format that Qwen3-Reranker was trained with.
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True)
class ScorePlan:
    """prompts: the pooling requests to run, all with `params`; a reranker's are made as they are
    read.  scores: makes the score of each pair, in order, from the values of these requests."""

    prompts: Iterable[Prompt]
    params: PoolingParams
    scores: Callable[[Sequence[np.ndarray]], list[float]]


def plan_scores(
    pooling: PoolingConfig,
    tokenizer: Any,
    queries: Any,
    documents: Any,
    params: PoolingParams,
    max_model_len: int,
    instruction: str | None = None,
) -> ScorePlan:
    """The plan of the pairs of queries and documents: one query for all documents, or one each.

    instruction: what "match" means, for a reranker.  Raises RequestError.
    """
    queries, documents = _texts("the query", queries), _texts("documents", documents)
    if len(queries) not in (1, len(documents)):
        raise RequestError(
            f"{len(queries)} queries for {len(documents)} documents: give one for all or one each"
        )
    pairs = [(j if len(queries) > 1 else 0, j) for j in range(len(documents))]
    if pooling.score_token_ids is not None:
        before, behind = (
            encode(text, tokenizer, add_special_tokens=False) for text in (_BEFORE, _BEHIND)
        )
        asked = INSTRUCTION if instruction is None else instruction

        def ids(query: str, document: str) -> list[int]:
            text = f"<Instruct>: {asked}\n<Query>: {query}\n<Document>: {document}"
            token_ids = encode(text, tokenizer, add_special_tokens=False)
            return truncate([*before, *token_ids, *behind], params, max_model_len, behind)

        return ScorePlan(
            (ids(queries[i], documents[j]) for i, j in pairs),
            replace(params, score_token_ids=pooling.score_token_ids),
            # The probabilities of "yes" where the answer is "yes" or "no".
            lambda values: [float(1 / (1 + np.exp(n - y))) for y, n in np.array(values, float)],
        )
    texts = [_named(pooling, "query") + query for query in queries]
    texts += [_named(pooling, "document") + document for document in documents]

    def cosines(values: Sequence[np.ndarray]) -> list[float]:
        return [float(values[i] @ values[len(queries) + j]) for i, j in pairs]

    return ScorePlan(texts, replace(params, normalize=True), cosines)


def _texts(name: str, texts: Any) -> list[str]:
    """A text or a list of them, as a list."""
    listed = [texts] if isinstance(texts, str) else texts
    if not isinstance(listed, (list, tuple)) or not all(isinstance(t, str) for t in listed):
        raise RequestError(f"{name} must be a text or a list of texts, got {show(texts)}")
    if not listed:
        raise RequestError(f"{name} must not be an empty list")
    return list(listed)


def _named(pooling: PoolingConfig, name: str) -> str:
    return pooling.prompt(name if name in pooling.prompts else None)
