# `make reproduce` and `make test` do all set-up on a fresh machine with Python 3.11 and git.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: reproduce grid grids quick test test-all lint setup clean

setup: $(INSTALLED)

# pip reads constraints.txt for every package, so an installation is the same everywhere.
$(INSTALLED): pyproject.toml constraints.txt requirements-embedded.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements-embedded.txt
	touch $@

reproduce: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" dvc repro
	@sed -n '/^## Dense beside/,/^## Ranks/p' reports/README.md | sed '/^## Ranks/d; /^!/d' | cat -s

# One table of grids/grids.yaml: make grid NAME=methods
grid: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" dvc repro grids/dvc.yaml:grid@$(NAME)
	@cat reports/grids/$(NAME).md

# All of them.
grids: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" dvc repro grids/dvc.yaml

# Every grid on little data, the ends of its ranges, into data/quick.
quick: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" dvc repro baseline fisher
	for name in methods ablation bits calibration; do $(BIN)/python -m stages.grid $$name --quick || exit 1; done

test: setup lint
	$(BIN)/python -m pytest

test-all: setup lint
	$(BIN)/python -m pytest -m ""

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf data/*.zarr data/*.partial data/*.resume data/model data/compressed data/timings data/finished data/continuation.jsonl data/cells data/grids data/quick data/study
