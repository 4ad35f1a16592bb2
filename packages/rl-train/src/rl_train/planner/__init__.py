"""Plan the memory of a run before it starts, and check its model and folders."""
