"""From text to training lanes: tokenizers, prepared data, lanes."""
