"""How a model of embeddings or scores is used, as sentence-transformers writes it to its folder."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_metal_lite.errors import ModelLoadError, Option, RequestError, one_line, show
from vllm_metal_lite.model.files.folder import read_json

logger = logging.getLogger(__name__)

# The fields of older folders, and the names in newer ones.
_MODES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "lasttoken": "last",
    "mean": "mean",
}


@dataclass(frozen=True)
class PoolingConfig:
    """The pooling that a model's folder describes.

    pooling: "last" or "mean".  prompts: prefixes for texts, by name.  default_prompt_name: the name
    of the prefix for requests that name none.
    score_token_ids: the tokens "yes" and "no" of a reranker.
    problem: why the model gives no embeddings, in a few words.
    """

    pooling: str = "last"
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    score_token_ids: tuple[int, ...] | None = None
    problem: str | None = None

    def prompt(self, name: str | None) -> str:
        """The prefix `name`; None: the default one.  Raises RequestError if there is no such
        prefix."""
        name = self.default_prompt_name if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise RequestError(Option("prompt_name"), f" must be one of: {known}; got {show(name)}")
        return self.prompts[name]


def pooling_config(folder: Path, name: str, vocab: Mapping[str, int]) -> PoolingConfig:
    """Read the settings in a model's folder.  If they cannot be read, `problem` says why."""
    try:
        return _read(folder, name, vocab)
    except (ModelLoadError, OSError, LookupError, ValueError, TypeError, AttributeError) as e:
        return PoolingConfig(problem=f"its settings cannot be read: {one_line(e)}")


def only_pools(folder: Path | None, name: str) -> bool:
    """Whether a model is made for embeddings or scores, and not for text: its folder has settings
    of sentence-transformers, or its name says so.  folder: None if the files are elsewhere."""
    settings = () if folder is None else (folder / "modules.json", folder / "1_Pooling")
    is_listed = any(path.exists() for path in settings)
    return is_listed or re.search("embed|rerank", Path(name).name.lower()) is not None


def _read(folder: Path, name: str, vocab: Mapping[str, int]) -> PoolingConfig:
    listed = read_json(folder / "modules.json", list)
    kinds = {str(module["type"]).rpartition(".")[2]: module["path"] for module in listed}
    texts = read_json(folder / "config_sentence_transformers.json")
    pooling = read_json(folder / kinds.get("Pooling", "1_Pooling") / "config.json")
    prompts = dict(texts.get("prompts") or {})
    for prompt_name, prompt in prompts.items():
        if not isinstance(prompt, str):
            raise ValueError(f"prompt {show(prompt_name)} must be a text, got {show(prompt)}")
    problem = _problem(read_json(folder / "config.json"), kinds, pooling, prompts)
    default = texts.get("default_prompt_name")
    if default is not None and default not in prompts:
        known = ", ".join(prompts) or "none"
        logger.warning(
            f"{name}: its default prompt {show(default)} is ignored: its prompts are {known}"
        )
        default = None
    labels = tuple(vocab[word] for word in ("yes", "no") if word in vocab)
    if "LogitScore" in kinds:
        scores = read_json(folder / kinds["LogitScore"] / "config.json")
        if labels != (scores.get("true_token_id"), scores.get("false_token_id")):
            problem = "it is a reranker, and its answers are not yes and no"
    is_reranker = "LogitScore" in kinds or "qwen3-reranker" in Path(name).name.lower()
    return PoolingConfig(
        pooling=_mode(pooling) or "last",
        prompts=prompts,
        default_prompt_name=default,
        score_token_ids=labels if is_reranker and len(labels) == 2 else None,
        problem=problem,
    )


def _mode(config: dict[str, Any]) -> str | None:
    """The pooling of a folder; None if it is neither "last" nor "mean", or several at once."""
    on = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    on = on or [str(config.get("pooling_mode"))]
    return _MODES.get(on[0]) if len(on) == 1 else None


def _problem(
    config: dict[str, Any], kinds: dict[str, Any], pooling: dict[str, Any], prompts: dict[str, str]
) -> str | None:
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        return "its attention is bidirectional, and this engine's is causal"
    if unknown := kinds.keys() - {"Transformer", "Pooling", "Normalize", "LogitScore"}:
        return f"it has a module that is not supported: {', '.join(sorted(unknown))}"
    mode = _mode(pooling)
    if pooling and mode is None:
        return "its pooling is neither that of the last token nor the mean"
    if mode == "mean" and any(prompts.values()) and not pooling.get("include_prompt", True):
        return "its mean excludes the prompt, which this engine cannot do"
    return None
