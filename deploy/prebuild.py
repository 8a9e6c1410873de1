"""Compile the DeepSpeed operators that would otherwise be compiled in the middle of a run (about three minutes, once).

    .venv/bin/python deploy/prebuild.py

They go to `torch_extensions/` inside the environment, where lm/machine.py makes every process look for them.
"""

import os
import subprocess
import sys

from lm import machine

OPERATORS = {"deepspeed_shm_comm": "ShareMemCommBuilder", "cpu_adam": "CPUAdamBuilder"}


def main() -> None:
    """Build what is missing."""
    folder = machine.extensions_folder()
    missing = [name for name in OPERATORS if not machine.extension_built(name)]
    if not missing:
        return
    machine.remove_extension_locks()
    for name in missing:
        print(f"setup: compiling DeepSpeed's {name}", flush=True)
        script = f"from deepspeed.ops.op_builder.cpu import {OPERATORS[name]} as B; B().load(verbose=False)"
        result = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "DS_ACCELERATOR": "cpu"},
        )
        if result.returncode or not machine.extension_built(name):
            sys.exit(f"setup: compiling {name} into {folder} failed:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")


if __name__ == "__main__":
    main()
