# Everything runs in .venv, with the versions of constraints.txt. Plain pip: it honours the machine's pip
# configuration, which decides between CPU and CUDA builds.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt
PYTEST := $(BIN)/python -m pytest

.PHONY: demo test quick check docs clean
.DEFAULT_GOAL := demo

demo: $(VENV)/core  ## train the calculator demo and print its summary
	$(BIN)/asyncrl train observe.console=auto $(ARGS)

test: $(VENV)/dev  ## the whole suite: units first, then real processes
	$(PYTEST) tests --ignore=tests/gpu $(ARGS)

quick: $(VENV)/dev  ## what to run while editing
	$(PYTEST) tests/unit tests/test_layering.py -m "not slow" -x -q $(ARGS)

check: $(VENV)/dev  ## style, types, direction of imports, generated docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) tests/test_layering.py -q
	$(BIN)/python tools/make_config_docs.py --check

docs: $(VENV)/dev  ## docs/configuration.md from asyncrl/config.py
	$(BIN)/python tools/make_config_docs.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The stamps say what is installed; a changed pin or dependency installs again.
$(VENV)/core: constraints.txt pyproject.toml | $(VENV)/bin/python
	@echo "installing asyncrl into $(VENV) (about 2 GB the first time)"
	$(PIP) --quiet -e .
	@touch $@

$(VENV)/dev: constraints.txt pyproject.toml | $(VENV)/core
	@echo "installing the test and check tools into $(VENV)"
	$(PIP) --quiet -e ".[dev]"
	@touch $@

clean:  ## remove the environment; runs/ stay
	rm -rf $(VENV)
