"""The command line `vllm-metal-lite`; commands.py lists its commands, and each has a file."""
