"""The HTTP server: the API of OpenAI and of Anthropic over engines in processes of their own."""
