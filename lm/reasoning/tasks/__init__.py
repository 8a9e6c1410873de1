"""The tasks: each module makes or reads its data, deterministically by seed, as one `Dataset` of arrays."""
