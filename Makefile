# Two commands do everything on a fresh machine with Python 3.11+ and make:
#   make demo    environment, install, two minutes: a race of heads live, trained models scored, one page; with LONG=1
#                also Fig. 2C: HYLA, softmax and linear heads, 18 networks in about ten minutes
#   make test    environment, install, all tests
# and while one writes code, make check (a minute): lines, types, words, and the tests of functions and layers.
# PY=python3.12 picks another Python.  torch: the build for the CPU where Linux has no card of NVIDIA (no nvidia-smi), else
# that of the package index; TORCH="torch==2.13.0 --index-url ..." picks any other.

PY ?= python3
TORCH ?=
PINNED := $(shell grep -E '^torch==' constraints.txt | cut -d' ' -f1)
CPU_BUILDS := https://download.pytorch.org/whl/cpu
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -qq
ANSWERS := import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=10)
export JAX_PLATFORMS ?= cpu
unexport PYTHONDONTWRITEBYTECODE  # or each process of the tests compiles anew all that it imports

.PHONY: demo test check lint format docs campaign test-newest release clean

.venv/.torch: constraints.txt
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11+ is needed: make demo PY=python3.12")'
	@echo "setting up .venv (once, a minute or more)"
	@test -x $(BIN)/python || $(PY) -m venv .venv
	@if [ -n "$(TORCH)" ]; then how="$(TORCH)"; echo "torch: $$how"; \
	elif [ "$$(uname -s)" != Linux ]; then how=$(PINNED); echo "torch: $$how"; \
	elif command -v nvidia-smi >/dev/null; then how=$(PINNED); echo "torch: $$how with CUDA (gigabytes), for the card here"; \
	elif $(BIN)/python -c '$(ANSWERS)' $(CPU_BUILDS) 2>/dev/null; then how="$(PINNED) --index-url $(CPU_BUILDS)"; \
		echo "torch: $$how (0.2 GB), as there is no nvidia-smi; TORCH=$(PINNED) takes the build for cards"; \
	else how=$(PINNED); echo "torch: $$how of the package index, maybe with CUDA (gigabytes): $(CPU_BUILDS) does not answer"; \
	fi; $(PIP) $$how
	@touch $@

.venv/.demo: .venv/.torch pyproject.toml
	@echo "installing polyhead; native code is compiled once where there is a C++ compiler (half a minute)"
	@$(PIP) -c constraints.txt -e '.[report]'
	@touch $@

.venv/.ready: .venv/.demo
	@$(PIP) -c constraints.txt -e '.[test,dev,report,hf,jax,text,docs]'
	@touch $@

demo: .venv/.demo
	@$(BIN)/polyhead demo
	@$(if $(LONG),$(BIN)/polyhead reproduce fig-2c --scale small --seeds 1)

test: .venv/.ready
	@$(BIN)/ruff check -q . && $(BIN)/ruff format -q --check . && $(BIN)/lint-imports --no-cache > /dev/null
	$(BIN)/python -m pytest -q -n 2

# Functions and layers, which all else stands on, without what compiles.
check: lint
	$(BIN)/python -m pytest -q -n 2 -m 'not compile' tests/ops tests/layers

lint: .venv/.ready
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports --no-cache && \
		$(BIN)/mypy && $(BIN)/codespell

format: .venv/.ready
	@$(BIN)/ruff check -q --fix . ; $(BIN)/ruff format -q .

# The site, in docs/_build/html; every warning is an error.
docs: .venv/.ready
	$(BIN)/python -m sphinx -q -W --keep-going -b html -D percent_execute=1 -d docs/_build/trees docs docs/_build/html
	@echo "docs/_build/html/index.html"

# Is any implementation wrong somewhere, and does a run survive every kill?  An hour.  The first line checks the types and
# shapes in annotations while the tests of functions and layers run.
campaign: .venv/.ready
	$(BIN)/python -m pytest -q -n 2 -m 'not compile' tests/ops tests/layers --jaxtyping-packages=polyhead,beartype.beartype
	$(BIN)/python benchmarks/parity.py --ops 5000 --native 2000 --jax 500 --models 1000 --cache 1000
	$(BIN)/python benchmarks/kills.py --kills 200

# The suite in an environment without pins: the newest versions that the ranges in pyproject.toml admit.
test-newest:
	$(PY) -m venv .venv-newest $(if $(TORCH),&& .venv-newest/bin/pip install -qq $(TORCH)) && \
		.venv-newest/bin/pip install -qq -e '.[test,report,hf,jax,text,docs]' && .venv-newest/bin/pip list | \
		grep -iE '^(torch|transformers|jax|numpy|pandas|scipy|triton|tokenizers|datasets|ray) '
	.venv-newest/bin/python -m pytest -q -n 2

# A dry run of a release: wheels and sdist, checked, and each installed into empty environments that run an example.
release: .venv/.ready
	$(BIN)/python packaging/release.py

clean:
	rm -rf .venv runs
