"""The shapes that people run, each in one format: the rows of the tables of several tools."""

from typing import Any, NamedTuple


class Part(NamedTuple):
    """bits: of random weights, None for bfloat16.  tiny: the shape of a dry run.

    bars: the ratios to mlx-lm that are wanted, by load of bench/serving.py.  kv_bits: of our store.
    settings: of mlx-lm's batches, where MLX's CUDA backend fails in larger ones.
    """

    shape: str
    bits: str | None
    tiny: str
    bars: dict[str, float]
    kv_bits: int | None = None
    settings: str = ""

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.bits or 'bf16'}"

    @property
    def options(self) -> dict[str, Any]:
        """Fields of EngineConfig."""
        return {} if self.kv_bits is None else {"kv_bits": self.kv_bits}


_EXPERTS = {"H": 3.0, "D": 1.5}
_SMALL = "4/32"
PARTS = (
    Part("qwen3-0.6b", "4", "128x2", {"H": 5.0, "D": 2.0}),
    Part("qwen3-30b-a3b", "4", "qwen3-moe-tiny", _EXPERTS, settings=_SMALL),
    Part("glm-4.7-flash", "4", "glm-tiny", _EXPERTS, settings=_SMALL),
    Part("gpt-oss-20b", "mxfp4", "gpt-oss-tiny", _EXPERTS, settings=_SMALL),
    Part("gemma3-4b", "4", "gemma3-tiny", {"H": 3.5, "D": 1.5}, 8),
    Part("qwen3-4b", "4", "128x2", {"H": 5.0, "D": 2.0}),
    Part("qwen3-30b-a3b", None, "qwen3-moe-tiny", _EXPERTS),
    Part("glm-4.7-flash", None, "glm-tiny", _EXPERTS),
)
BY_NAME = {part.name: part for part in PARTS}
