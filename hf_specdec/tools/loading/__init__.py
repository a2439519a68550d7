"""From names to what a command works with: models, tokenizers, drafters and prompts."""
