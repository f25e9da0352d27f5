# Needs make and Python 3.11 to 3.13; everything else goes into .venv. After the first run nothing is fetched any more.
#
#   make demo                     the whole pipeline on this machine; ARGS="--once --json" and the like are passed on
#   make test                     all tests, some files at a time; ARGS="-n 0 -k broker" and the like are passed on to pytest
#   make faults                   300 workers killed at moments of chance (half an hour); ARGS="--kills 1000 --seed 7" and the like
#   make lint                     style and types
#   PYTHON=/path/to/python make … a Python of your choice

.DEFAULT_GOAL := help
SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

# Named after what it installed, so that a change of the requirements installs again and a mere touch does not.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml requirements.lock | cksum | cut -d' ' -f1)

.PHONY: help demo test faults lint format clean install lock

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed '/^Named after/,$$d'

demo: $(STAMP)
	@$(BIN)/kvcensus demo $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

faults: $(STAMP)
	@$(BIN)/python -m tests.faults $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

install: $(STAMP)

# What it says goes to stderr: `make demo ARGS=--json` prints one document and nothing else.
$(STAMP):
	@python=$$(sh infra/find-python.sh) || exit 1; \
	{ \
	  echo "kvcensus: installing into $(VENV) with $$python (about 1.5 GB on disk; a few minutes, once)" && \
	  rm -f $(VENV)/.installed-* && \
	  "$$python" -m venv $(VENV) && \
	  $(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -c requirements.lock -e '.[dev]' && \
	  touch $@ && \
	  echo "kvcensus: installed; from now on this works offline"; \
	} >&2 || { echo "kvcensus: installing failed (the reason is above); run the same command again to go on" >&2; exit 1; }

# The exact versions that are tested, out of what .venv holds now.
lock: $(STAMP)
	@{ echo "# Exact versions of everything in .venv, as tested: constraints for pip. Made by \`make lock\`."; \
	  $(BIN)/python -m pip freeze --all --exclude-editable --exclude pip; } > requirements.lock.new
	@mv requirements.lock.new requirements.lock

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
