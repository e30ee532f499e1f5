# Both main targets do their own set-up: they make .venv and install into it once.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: train test bench sabotage lint types clean

train: .venv/core.stamp
	$(BIN)/python train_jax.py $(if $(wildcard runs/docs/checkpoints),--resume)

test: .venv/test.stamp
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

# Speed and memory against PyTorch, into benchmarks/results.json, docs/performance.md and docs/performance.png: 20 minutes.
# `make bench ROWS="lm-step-32 generate-1"` for some of the rows; `python -m benchmarks --list` names them.
bench: .venv/test.stamp
	$(BIN)/python -m benchmarks $(if $(ROWS),--rows $(ROWS))

# Plants every known fault, tries 500 honest pairs, and writes what was caught to docs/sabotage.md: half an hour.
sabotage: .venv/test.stamp
	cd parity_tests && ../$(BIN)/python -m sabotage --docs ../docs/sabotage.md

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/test.stamp
	$(BIN)/ty check

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "flax_tf needs Python 3.11 or newer, found " + sys.version)'
	$(PYTHON) -m venv .venv

.venv/core.stamp: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing into .venv, once: a few minutes"
	$(PIP) --editable .
	touch $@

.venv/test.stamp: .venv/core.stamp
	@echo "installing PyTorch and the test tools into .venv, once: a few minutes"
	$(PIP) --editable '.[test]'
	touch $@

clean:
	rm -rf .venv
