"""Which rectangle of which Hugging Face tensor every rank of a grid holds."""
