"""Accelerator operations: one folder per op, with a reference and one file per backend."""
