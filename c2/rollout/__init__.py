"""The rollout engine: samples from the policy and records exactly what it sampled from."""
