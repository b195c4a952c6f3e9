"""OpenAI's API (chat, completions, responses, embeddings), and vLLM's rerank, score, tokenize."""
