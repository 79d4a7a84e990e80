"""`python -m rollout_engine` is the same as `rollout`."""

from rollout_engine.cli import main

if __name__ == "__main__":
    main()
