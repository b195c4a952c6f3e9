"""The command line, `vllm-metal-lite`: chat, serve, launch, generate, models, bench and doctor."""
