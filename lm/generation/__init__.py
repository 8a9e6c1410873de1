"""Generation from a model and its state."""
