"""Training: the plain loop (loop.py), which everything distributed is tested against, and the demo."""
