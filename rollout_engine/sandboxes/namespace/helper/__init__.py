"""What runs inside the launcher and its boxes: standard library only, and never an import of the engine."""
