"""Asynchronous reinforcement learning: who runs, what counts, who learns what."""
