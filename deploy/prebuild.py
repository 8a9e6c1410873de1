"""Compile the DeepSpeed operators that would otherwise be compiled in the middle of a run (about three minutes, once).

    .venv/bin/python deploy/prebuild.py

They go to `torch_extensions/` inside the environment; `lm/extensions.py` points every process there. A compilation killed
half-way leaves a lock file on which every later run would wait for ever, so locks are removed before building.
"""

import subprocess
import sys

from lm import extensions

OPERATORS = {"deepspeed_shm_comm": "ShareMemCommBuilder", "cpu_adam": "CPUAdamBuilder"}


def main() -> None:
    folder = extensions.use()
    missing = [name for name in OPERATORS if not extensions.built(name)]
    if not missing:
        return
    extensions.remove_locks()
    for name in missing:
        print(f"setup: compiling DeepSpeed's {name}", flush=True)
        script = f"from deepspeed.ops.op_builder.cpu import {OPERATORS[name]} as B; B().load(verbose=False)"
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        if result.returncode or not extensions.built(name):
            sys.exit(f"setup: compiling {name} into {folder} failed:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")


if __name__ == "__main__":
    main()
