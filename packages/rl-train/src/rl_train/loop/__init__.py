"""`rl-train train`: the training loop of actors and critics, from prompts in a file and a reward in Python."""
