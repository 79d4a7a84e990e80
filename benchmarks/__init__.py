"""Benchmarks: what the engine costs, beside its peers and the bare limit, on this machine."""
