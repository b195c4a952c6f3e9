"""The command line: `vllm-metal-lite chat` and `vllm-metal-lite generate`."""
