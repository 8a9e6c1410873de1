"""The processes of a run: who this one is, and the few things that all of them do together."""

import os
import socket
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lm import machine
from lm.errors import UserError
from lm.model.pretrained import resolve_device


class World:
    """The processes of a run. Started by a launcher they find each other through its variables; else there is one."""

    def __init__(self, distributed: bool, timeout: int, device: torch.device | None = None) -> None:
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.distributed = distributed
        self.device = device or resolve_device("auto")  # with `cuda` each process of a node computes on a GPU of its own
        if str(self.device) == "cuda":
            self.device = torch.device("cuda", self.local_rank)
        elif self.device.type == "cuda" and self.size > 1:
            raise UserError(
                f"--device {str(self.device)!r}: one GPU for {self.size} processes; give cuda, each then takes its own"
            )
        if not distributed:
            if self.size > 1:
                raise UserError(f"training.backend: plain runs on one process, not on {self.size}; use backend: deepspeed")
            return
        if "MASTER_ADDR" not in os.environ:
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
            os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **where})
        if self.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        deepspeed = import_deepspeed()
        try:
            deepspeed.init_distributed(timeout=timedelta(seconds=timeout), verbose=False)
        except dist.DistError as error:
            place = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT')}"
            raise UserError(
                f"process {self.rank} of {self.size}: not all met at {place} within training.timeout, {timeout} s "
                f"({str(error).splitlines()[0]}); start all of them, and see that they can reach that address"
            ) from error

    @property
    def first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes."""
        if self.size == 1:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def from_first(self, value: Any) -> Any:
        """The first process's value."""
        return self.gather(value)[0]

    def barrier(self) -> None:
        """Wait for all."""
        self.gather(None)

    def close(self) -> None:
        """Leave the group."""
        if self.distributed and dist.is_initialized():
            dist.destroy_process_group()


def import_deepspeed() -> Any:
    """DeepSpeed, told where its compiled operators are."""
    folder = machine.extensions_folder()
    locks = [str(lock) for lock in folder.glob("*/lock")]
    if locks:
        raise UserError(
            f"{', '.join(locks)}: another process is compiling DeepSpeed's operators, or was killed while it did; "
            "wait for it, or delete the file and run again"
        )
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            f"training.backend: deepspeed cannot be imported ({error}); install `pmi-lm[train]` or use backend: plain"
        ) from error
    from deepspeed.utils import logger

    logger.setLevel("ERROR")  # it warns of every optimiser that is not its own
    # it uses names that torch is about to rename, and torch says so at every call
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    return deepspeed


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
