"""`vllm-metal-lite bench`: how fast this engine is, over a grid of loads."""

from vllm_metal_lite.cli.bench.command import run as run
