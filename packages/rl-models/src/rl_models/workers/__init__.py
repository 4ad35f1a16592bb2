"""Actors and critics: what a user calls, the same on each engine."""
