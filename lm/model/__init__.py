"""The model: decoder, memory, state. Start reading at decoder.py, then memory.py."""

from lm.model.decoder import PMI
from lm.model.state import State

__all__ = ["PMI", "State"]
