"""Ctrl-C and SIGTERM: the first asks the run to save and end, a later one ends it at once."""

import os
import signal
import sys
import time
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_SIGNAL = 1.0
"""Seconds in which a repeated signal counts as the same: a launcher passes on what the terminal already sent."""


class StopRequest:
    """Set by the first signal."""

    def __init__(self) -> None:
        self.signal = 0
        self._at = 0.0
        self._before = {kind: signal.signal(kind, self._receive) for kind in SIGNALS}

    def _receive(self, kind: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal and now - self._at > SAME_SIGNAL:
            os.write(sys.stderr.fileno(), b"second signal: ended at once, nothing saved\n")
            os._exit(128 + kind)
        if not self.signal:
            self.signal, self._at = kind, now

    def close(self) -> None:
        """Give the signals back."""
        for kind, handler in self._before.items():
            signal.signal(kind, handler)
