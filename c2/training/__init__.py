"""Training: state, optimizer, step, loop, checkpoints and what a person sees of a run."""
