# Every target makes and reuses its own virtual environment. A fresh machine needs python3 (3.11 or
# newer) with venv, make, and a C++ compiler (Inductor builds CPU kernels with it).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONTRACT := $(VENV)/.flashinfer
JOBS ?= 2
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check bench compat gpu format clean

# The main job: serve a byte-level Llama eagerly and from graphs, and compare every token.
demo: $(STAMP)
	$(BIN)/python -m examples.llama.serve

# Lint, types, import arrows and all tests, those of the calls into FlashInfer included.
test: check $(CONTRACT)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -q

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks.fill
	$(BIN)/python -m benchmarks.host_replay
	$(BIN)/python -m benchmarks.decode_traffic

# The tests under another torch, in an environment of its own: make compat TORCH=2.11.0
TORCH ?= 2.11.0
COMPAT := .venv-$(TORCH)
compat: $(COMPAT)/.installed
	$(COMPAT)/bin/python -m pytest -n $(JOBS) --dist loadgroup -q

# What only a CUDA device can show, with $(PYTHON) as it is: torch, triton and pytest are enough.
gpu:
	PYTHONPATH=. PYTHON=$(PYTHON) scripts/gpu_check.sh

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,examples]"
	touch $@

# FlashInfer imports on a CPU, without the CUDA packages that it asks for.
$(CONTRACT): $(STAMP) constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps flashinfer-python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt apache-tvm-ffi einops ninja nvidia-ml-py packaging requests tabulate tqdm numpy click cuda-python
	touch $@

$(COMPAT)/.installed: pyproject.toml constraints.txt
	test -x $(COMPAT)/bin/python || $(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH)
	grep -vE '^(torch|triton)==' constraints.txt > $(COMPAT)/constraints.txt
	$(COMPAT)/bin/python -m pip install --quiet --disable-pip-version-check -c $(COMPAT)/constraints.txt -e ".[test,examples]" torch==$(TORCH)
	touch $@

clean:
	rm -rf $(VENV) .venv-* build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
