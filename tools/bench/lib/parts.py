"""The shapes that people run, each in one format: the rows of the tables of several tools."""

from typing import Any, NamedTuple


class Part(NamedTuple):
    """bits: of random weights, None for bfloat16.  tiny: the shape of a dry run.

    settings: of mlx-lm's batches, where MLX's CUDA backend fails in larger ones.
    options: fields of EngineConfig.
    """

    shape: str
    bits: str | None
    tiny: str
    settings: str = ""
    options: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.bits or 'bf16'}"


_SMALL = "4/32"
PARTS = (
    Part("qwen3-0.6b", "4", "128x2"),
    Part("qwen3-30b-a3b", "4", "qwen3-moe-tiny", _SMALL),
    Part("glm-4.7-flash", "4", "glm-tiny", _SMALL),
    Part("gpt-oss-20b", "mxfp4", "gpt-oss-tiny", _SMALL),
    Part("gemma3-4b", "4", "gemma3-tiny", options={"kv_bits": 8}),
    Part("qwen3-4b", "4", "128x2"),
    Part("qwen3-30b-a3b", None, "qwen3-moe-tiny"),
    Part("glm-4.7-flash", None, "glm-tiny"),
)
BY_NAME = {part.name: part for part in PARTS}
