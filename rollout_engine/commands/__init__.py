"""The commands of `rollout`, one file each. cli.py imports one of them only when it runs, so that help stays fast."""
