"""Processes of this machine beside a run: one host for rewards, environments and engines."""
