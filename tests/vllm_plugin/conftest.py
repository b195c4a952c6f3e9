"""Tests of the plugin under real vLLM; skipped where vLLM is not installed."""

import os

# Engines live in this process, where a test can look at the scheduler's blocks.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["VLLM_NO_USAGE_STATS"] = "1"
