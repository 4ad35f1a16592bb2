"""Trajectories: the calls of an engine as token ids, and the samples that a policy learns from."""
