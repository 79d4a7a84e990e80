"""What judges verifier code, inside sandboxes: standard library only, and its only imports are its own modules."""
