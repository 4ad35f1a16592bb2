"""Training checkpoints: model, optimizer, random states, and the folder of a run."""
