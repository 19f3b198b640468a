"""Sandboxes: where untrusted code runs. Imports no jax and starts in milliseconds."""
