"""The interception proxy: an agent program asks it as it would ask its provider, and the run's model answers."""
