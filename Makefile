# Every target does its own set-up. PYTHON names the interpreter that .venv is made with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint format bench gpu-check clean

setup: $(STAMP)
	@$(BIN)/otel-forge collector install

# A stamp that is written last: an interrupted set-up is done again, a finished one is not. A venv that was moved or half made is made anew.
$(STAMP): pyproject.toml
	@$(BIN)/python -c 'import sys' 2>/dev/null && $(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	@echo "installing packages into $(VENV) (torch is about 3 GB)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -q -e '.[dev]'
	@touch $@

demo: setup
	@$(BIN)/otel-forge demo

test: setup lint
	@$(BIN)/python -m pytest

lint: $(STAMP)
	@$(BIN)/ruff format --check -q .
	@$(BIN)/ruff check -q .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(STAMP)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup
	@$(BIN)/otel-forge bench

# Without a GPU: one line that says so. With one: the tests that need it, and figures.
gpu-check: $(STAMP)
	@$(BIN)/python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || { echo "gpu-check: torch sees no GPU here, nothing was checked"; exit 0; }; \
	$(BIN)/python -m pytest tests/gpu -m gpu -s

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
