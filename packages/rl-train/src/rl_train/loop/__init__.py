"""`rl-train train`: a loop around actors and critics, for prompts in a file and a reward in Python."""
