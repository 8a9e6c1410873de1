"""What a process needs from its machine: instructions that work, an allocator that keeps its pages, extensions, a free port."""

import contextlib
import ctypes
import mmap
import os
import platform
import random
import socket
import sys
from pathlib import Path

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # mallopt's names for them, from malloc.h


_TILE_PALETTES = bytes.fromhex("53b81d00000031c90fa25bc3")  # push rbx; mov eax, 0x1d; xor ecx, ecx; cpuid; pop rbx; ret


def avoid_broken_amx() -> None:
    """Keep oneDNN off the AMX units where a hypervisor announces them but hides the palettes needed to configure them.

    There the first bfloat16 product would end the process with an illegal instruction.
    """
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpuinfo.is_file() or "amx_tile" not in cpuinfo.read_text():
        return
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # a system that forbids executable pages: nothing can be found out, nothing is changed
        return
    page.write(_TILE_PALETTES)
    palettes = ctypes.CFUNCTYPE(ctypes.c_uint32)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    if palettes() == 0:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def keep_pages() -> bool:
    """Make glibc's malloc keep freed memory instead of returning it to the kernel; false where that cannot be done.

    Activations of tens of megabytes are otherwise mapped and unmapped at every operation, and the page faults cost a CPU
    training step a third of its time. Call it before the first large tensor.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(bool(mallopt(*setting)) for setting in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 64 * 2**20)))


def give_way() -> None:
    """Let this thread, and what it starts from here on, wait for a free core when it is woken instead of taking one (Linux).

    Many short tasks beside one that computes (an engine's loop) would otherwise interrupt it at each of their wake-ups.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def come_first() -> None:
    """Take this thread out of those that give way; any other policy is its user's choice and stays."""
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_BATCH:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def extensions_folder() -> Path:
    """Point torch at this environment's folder of compiled extensions (unless the user chose another) and return it."""
    # ... and at the environment's own ninja: another version takes everything for changed and compiles it again
    programs = str(Path(sys.prefix) / "bin")
    if os.environ.get("PATH", "").split(os.pathsep)[0] != programs:
        os.environ["PATH"] = os.pathsep.join(filter(None, [programs, os.environ.get("PATH")]))
    return Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions")))


def extension_built(name: str) -> bool:
    """Whether the extension `name` is compiled and no build of it was left half-way."""
    folder = extensions_folder() / name
    return any(folder.glob("*.so")) and not (folder / "lock").exists()


def remove_extension_locks() -> list[Path]:
    """Delete the lock files that a killed compilation leaves behind, on which every later run would wait; returns them."""
    locks = list(extensions_folder().glob("*/lock"))
    for lock in locks:
        lock.unlink(missing_ok=True)
    return locks


def free_port() -> int:
    """A port that nobody listens on just now: not one that the system hands out by itself, for Ray's processes take those."""
    while True:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
            return int(free.getsockname()[1])
