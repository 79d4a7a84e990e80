"""The package's version: one place for pyproject, run.json and the check that all nodes have the same."""

VERSION = "0.1.0"
