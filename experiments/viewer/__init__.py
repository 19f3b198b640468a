"""The trajectory viewer: rollouts of a group side by side, token by token, in one HTML file."""

from experiments.viewer.page import View, write

__all__ = ["View", "write"]
