"""Serving: transformers' OpenAI-compatible server, over a model whose every answer is drafted; other engines' words."""
