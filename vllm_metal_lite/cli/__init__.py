"""The command line: `vllm-metal-lite chat`, `generate`, `doctor` and `bench`."""
