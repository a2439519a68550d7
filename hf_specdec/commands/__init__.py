"""What the commands of `hf-specdec` take and say: a module each, imported once its command is called."""
