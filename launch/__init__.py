"""Process start: the only place with flags, environment variables and run folders."""
