"""A package, so that the Ray cluster of its tests ends with them."""
