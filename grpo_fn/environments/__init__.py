"""Environments of episodes of several turns: pure functions over plain data, which gin names."""
