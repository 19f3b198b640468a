"""Weight sync: versions of a model's weights as a chain of deltas in an object store."""
