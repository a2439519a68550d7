"""Is a way of decoding what it says: the target's own text, its distribution, its stops? On the user's own prompts."""
