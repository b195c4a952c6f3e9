"""A report that users share: one JSON object, without names of users, hosts and folders."""

import platform
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_metal_lite import backend
from vllm_metal_lite.cli import machine
from vllm_metal_lite.cli.options import engine_flag, local
from vllm_metal_lite.config import EngineConfig
from vllm_metal_lite.errors import OutOfMemoryError
from vllm_metal_lite.model.loader import LoadedModel
from vllm_metal_lite.runner.memory import size_store, store_bytes


def new_report(kind: str) -> dict[str, Any]:
    """The start of a report; kind: the command that makes it, "doctor" or "bench"."""
    return {
        "report": "vllm-metal-lite",
        "schema": 2,
        "kind": kind,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.facts(),
    }


def model_facts(name: str, model: LoadedModel) -> dict[str, Any]:
    """A model, as reports describe it; name: the user's name for it."""
    return {
        "name": public_name(name),
        "type": model.model_type,
        "parameters": model.num_parameters,
        "weight_bytes": model.weight_bytes,
        "dtype": backend.dtype_name(model.dtype),
    }


def public_name(model: str) -> str:
    """A model's name as reports give it: "demo", a Hugging Face name, or "local" for a folder."""
    is_hub_name = re.fullmatch(r"\w[\w.-]*/[\w.-]+", model) and local(model) is None
    return model if model == "demo" or is_hub_name else "local"


def without_names(shared: Any, model: str | None) -> Any:
    """A report, or its text, without the user's folders and the machine's name."""
    hidden = {str(Path.home()): "~"}
    if model is not None and public_name(model) == "local":
        folder = local(model) or Path(model)
        paths = (str(folder.resolve()), str(folder), model)
        # A bare name may be a word of the report.
        hidden = {path: "MODEL" for path in paths if "/" in path} | hidden
    hidden[platform.node()] = "HOST"
    return _replaced(shared, hidden)


def _replaced(value: Any, hidden: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for text, other in hidden.items():
            # A bare name alone is a word of the report: a host may have the name "local".
            if text and (value != text or "/" in text):
                value = re.sub(rf"(?<!\w){re.escape(text)}(?!\w)", other, value)
        return value
    if isinstance(value, dict):  # the machine stays: a host may have the name "Apple"
        return {k: v if k == "machine" else _replaced(v, hidden) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(item, hidden) for item in value]
    return value


def context_that_fits(
    model: LoadedModel, peak_of: Callable[[LoadedModel, EngineConfig, int], int]
) -> dict[str, Any]:
    """The context that an engine with default options has, with the weights in memory.

    peak_of: the bytes of a full step, measured or estimated.
    The result has max_model_len, the longest request here; num_tokens and kv_store_bytes count all
    requests together.  If the model does not fit, num_tokens is 0 and memory_problem says why.
    """
    config = EngineConfig()
    try:
        groups, max_model_len, _ = size_store(model, config, peak_of)
    except OutOfMemoryError as e:
        problem = e.spelled(engine_flag).removeprefix(f"{model.name} does not fit: ")
        return {"max_model_len": 0, "num_tokens": 0, "memory_problem": problem}
    return {
        "max_model_len": max_model_len,
        "num_tokens": groups[0].num_blocks * config.block_size,
        "kv_store_bytes": store_bytes(model, groups, config.block_size),
    }
