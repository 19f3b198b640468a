# `make demo` and `make test` do everything on a machine that has Python 3.11 or newer.
#   make demo PYTHON=python3.12 VENV=.venv312     another interpreter, in a folder of its own

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKDIR ?= runs/demo
WORKERS ?= 2
# Large buffers from large pages: without it a training step spends a tenth of its time on page faults.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.PHONY: demo test test-all lint aot clean

demo: $(VENV)/.ready
	$(BIN)/python -m launch.main --config=experiments/recipe.py:mini --workdir=$(WORKDIR)

test: $(VENV)/.ready-dev lint
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

test-all: $(VENV)/.ready-dev lint
	$(BIN)/python -m pytest -n $(WORKERS)

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

# Compiles the kernels for GPUs and TPUs. In an environment of its own: with compilers for them, jax
# looks for such chips whenever it starts, and they take more than a gigabyte.
aot: $(VENV)-aot/.ready-aot
	$(VENV)-aot/bin/python -m launch.aot

$(VENV)-aot/.ready-aot: setup.cfg pyproject.toml constraints.txt
	$(MAKE) VENV=$(VENV)-aot $(VENV)-aot/.ready
	$(VENV)-aot/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[aot]"
	touch $@

$(VENV)/.ready: setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); try make PYTHON=python3.12"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-aot *.egg-info
