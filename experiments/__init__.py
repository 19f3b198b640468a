"""Studies: one file per question, each with its config, its run and its claims."""
