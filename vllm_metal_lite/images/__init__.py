"""Pictures in prompts: from a file's bytes to rows of a model's embeddings."""
