"""Processes that `datasets` forks to tokenize: they leave Ctrl-C to their parent and end when it ends, however it does.

Without this, after `kill -9` they (and the process of their queue) would wait for work forever.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal a process gets when the thread that forked it ends."""

_dependent = False
_by_main_thread = True
_hooked = False


@contextmanager
def dependent_children() -> Iterator[None]:
    """Processes forked in this block depend on this one (on Linux; elsewhere they only ignore Ctrl-C)."""
    global _dependent, _hooked
    if not _hooked:
        os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
        _hooked = True
    _dependent = True
    try:
        yield
    finally:
        _dependent = False


def _before_fork() -> None:
    global _by_main_thread
    _by_main_thread = threading.current_thread() is threading.main_thread()


def _after_fork() -> None:
    if _dependent:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # A pool's own thread replaces a worker that died. That thread ends before the pool does: were the replacement
        # killed with it, it would take the lock of the pool's queue along, and the pool would wait for it forever.
        if sys.platform == "linux" and _by_main_thread:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
