"""Drafters on the Hugging Face Hub: load, save, push, and the `GenerationConfig` flag."""
