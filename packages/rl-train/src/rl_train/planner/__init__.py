"""The planner: memory and communication of a run before it starts."""
