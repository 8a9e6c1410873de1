"""`python -m lm ...`, `torchrun -m lm ...`, `deepspeed --module lm ...`: the same commands as `pmi`."""

from lm.cli import main

if __name__ == "__main__":
    main()
