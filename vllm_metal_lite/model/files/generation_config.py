"""A model's generation_config.json: the sampling parameters of requests that name none.

A bad entry is ignored with a warning, so that every model loads that mlx-lm loads.
"""

import logging
from pathlib import Path
from typing import Any

from vllm_metal_lite.errors import ModelLoadError, SamplingError
from vllm_metal_lite.model.files.folder import read_json
from vllm_metal_lite.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """SamplingParams fields that the model asks for."""
    path, fields = folder / "generation_config.json", {}
    try:
        config = read_json(path)
    except ModelLoadError as e:
        logger.warning(f"{path.parent}/{e}: the file is ignored")
        return {}
    for name in _FIELDS:
        if (value := config.get(name)) is not None:
            try:
                fields[name] = getattr(SamplingParams(**{name: value}), name)
            except SamplingError as e:
                logger.warning(f"{path}: {e}: the value is ignored")
    if config.get("do_sample") is False:
        fields["temperature"] = 0.0
    return fields
