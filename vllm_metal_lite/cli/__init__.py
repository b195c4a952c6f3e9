"""Commands of `vllm-metal-lite`: chat, serve, launch, generate, models, bench, doctor and cache."""
