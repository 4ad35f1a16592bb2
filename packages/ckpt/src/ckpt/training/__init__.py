"""Training checkpoints: model, optimizer, random states and the run that they belong to."""
