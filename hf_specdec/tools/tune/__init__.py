"""`hf-specdec tune`: the drafter and the settings that decode given prompts fastest."""
