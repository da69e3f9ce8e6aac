# One front command file: people and CI call the same targets. `make demo` and `make test` start from nothing.
#
#   make demo       run the first notebook end to end, write one offline page under runs/
#   make test       the test suite
#   make test-slow  long fuzz, browser, compile and packaging tests
#   make check      lint, formatting, types, import floors, documentation snippets, module length
#   make lab        JupyterLab on the notebooks
#   make clean      remove caches and build output (never runs/, never .venv)
#
# TORCH_INDEX_URL may name one more package index to take torch from (a CPU build on a machine without a GPU).

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)

# Two workers with one thread each beat one worker with two: most tests are many small steps.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS)

.PHONY: demo test test-slow check lab clean prerequisites

demo: $(STAMP)
	@$(BIN)/python -m mok.demo

test: $(STAMP)
	$(PYTEST) -m "not slow" tests

test-slow: $(STAMP)
	$(PYTEST) -m slow tests

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -m "not slow" tests/test_docs.py tests/test_frame.py

lab: $(STAMP)
	$(BIN)/jupyter lab notebooks

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# The stamp makes the second run quick; editing either list installs again.
$(STAMP): pyproject.toml constraints.txt | prerequisites
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a minute or two the first time)"
ifdef TORCH_INDEX_URL
	@$(BIN)/python -m pip install --quiet --extra-index-url "$(TORCH_INDEX_URL)" "$(TORCH)"
endif
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

prerequisites:
	@missing=""; \
	command -v git >/dev/null || missing="$$missing git"; \
	command -v $(PYTHON) >/dev/null || missing="$$missing python3"; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3-venv"; \
	if [ -n "$$missing" ]; then \
	  echo "missing:$$missing. On Debian or Ubuntu:  apt-get install -y git make python3 python3-venv" >&2; exit 1; \
	fi; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is older than 3.11; name a newer one:  make PYTHON=python3.12 ..." >&2; exit 1; }
