"""Meshes: how arrays are laid out over devices."""
