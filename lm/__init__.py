"""PMI-TR: a causal language model with a two-level memory, its data, trainer, evaluator and generator."""
