"""Options of a run: declared, derived, checked and resolved."""
