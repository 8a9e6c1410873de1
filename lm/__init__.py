"""PMI-TR: a causal language model with a two-level memory, its data, trainer, evaluator and generator."""

from lm import machine

machine.avoid_broken_amx()  # before torch chooses its instructions
