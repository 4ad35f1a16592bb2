"""The optimizers of engines: their options and interface, AdamW, Muon, and the storage of their moments."""
