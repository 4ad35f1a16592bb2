"""Rewards: functions of prompts and responses."""
