"""The thin Ray binding of rollout_engine: hosts as actors, one per node."""
