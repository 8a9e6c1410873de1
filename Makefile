# make run    set up, train a small model on the bundled text, serve it, stream from a session
# make test   set up, lint, type-check and run the tests
SHELL := /bin/bash
BIN := .venv/bin

.PHONY: run test test-full lint setup clean

run: setup
	$(BIN)/pmi demo --out runs/demo
	$(BIN)/pmi tour --checkpoint runs/demo/model --store runs/demo/sessions.db

test: setup lint
	$(BIN)/python -m pytest -m "not full"

test-full: setup lint
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup:
	@deploy/setup.sh

bench-model: setup
	$(BIN)/python -m benchmarks.model

bench-stream: setup
	$(BIN)/python -m benchmarks.stream --preset tiny --tokens 1000000
	$(BIN)/python -m benchmarks.stream --preset enwik8 --tokens 50000 --rounds 8

bench-data: setup
	$(BIN)/python -m benchmarks.data

bench-sessions: setup
	$(BIN)/python -m benchmarks.sessions

bench-training: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.training
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 2 -m benchmarks.training

bench-evaluation: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.evaluation

bench-engine: setup
	$(BIN)/python -m benchmarks.engine

bench-serving: setup
	$(BIN)/python -m benchmarks.serving
	$(BIN)/python -m benchmarks.serving --part load --preset tiny --minutes 10

bench-reasoning: setup
	$(BIN)/python -m benchmarks.reasoning

bench-plan: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.plan --preset tiny --seconds 30

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
