# make serve   an environment in .venv, then the demo model over HTTP (MODEL=folder for another)
# make test    the same environment with the test tools, then the tests
PYTHON ?= python3
BIN := .venv/bin
MODEL ?= demo
ARGS ?=
# The demo models have good draft blocks: a processor makes their tokens nearly twice as fast.
DRAFTS := $(if $(filter demo demo-glm,$(MODEL)),--spec-tokens 3)

.PHONY: serve test lint format clean

serve: .venv/installed
	$(BIN)/moet serve $(MODEL) $(DRAFTS) $(ARGS)

test: export PYTHONDONTWRITEBYTECODE =
test: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

lint: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy moet

format: .venv/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist *.egg-info

.venv/bin/python:
	$(PYTHON) -m venv .venv

# Without an NVIDIA GPU, one torch release is pinned so that the CPU results stay comparable.
TORCH = $(shell $(BIN)/python -c "import torch" 2>/dev/null || command -v nvidia-smi >/dev/null \
	|| echo torch==2.13.0)

EXTRA = $(shell command -v nvidia-smi >/dev/null && echo "[cuda]")

.venv/installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install -q $(TORCH) -e ".$(EXTRA)"
	touch $@

# What tests import of thousands of files is compiled when they do, once for all their processes.
.venv/installed-dev: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install -q --no-compile $(TORCH) -e ".[dev]"
	touch .venv/installed $@
