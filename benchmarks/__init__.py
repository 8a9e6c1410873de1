"""What is measured, side by side and as ratios: `make bench-...`, or `python -m benchmarks.NAME --help`."""
