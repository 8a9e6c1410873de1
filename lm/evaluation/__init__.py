"""Evaluation: perplexity with carried memory, and tasks that only a memory can solve."""
