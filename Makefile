# `make cycle` and `make test` each do all of their own set-up.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: install cycle recompute seeds test unit faults integration check format docs clean

install: $(STAMP)

$(STAMP): pyproject.toml infra/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint infra/constraints.txt --editable '.[dev]'
	touch $@

cycle: install
	$(BIN)/rollhouse run infra/runs/demo.toml

# Every rollout log-probability of the demo again, from its published weights.
recompute: install
	$(BIN)/python -m tests.recompute var/demo/lake

# Three seeds and the permuted-reward control; about four times as long as `make cycle`.
seeds: install
	$(BIN)/python tests/benchmarks/demo_seeds.py

test: install
	$(BIN)/python -m pytest

unit: install
	$(BIN)/python -m pytest tests/unit

faults: install
	$(BIN)/python -m pytest tests/faults

integration: install
	$(BIN)/python -m pytest tests/integration

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The tables, views, rules and run-file keys, printed from the code.
docs: install
	$(BIN)/python -m flows.reference docs/reference.md

clean:
	rm -rf var build *.egg-info
