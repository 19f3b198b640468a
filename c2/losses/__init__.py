"""Losses and penalties: pure functions of arrays."""
