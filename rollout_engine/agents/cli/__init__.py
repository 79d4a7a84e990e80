"""Agents that are programs: each is run in the rollout's sandbox, and its model calls come to a proxy of its own."""
