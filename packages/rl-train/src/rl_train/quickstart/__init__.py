"""`rl-train quickstart`: a small model learns a small task, end to end on real files."""
