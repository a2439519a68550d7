"""Check that a way of decoding keeps the target's text, distribution and stops, on the user's own prompts."""
