# Two commands from a fresh clone: `make demo` and `make test`. Each makes the environment it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint types unit nightly audit bench clean

demo: $(READY)
	$(BIN)/tbbn run

test: lint types unit

lint: $(READY)
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks

types: $(READY)
	$(BIN)/mypy

# One process per core, one thread each: small tensors gain nothing from more.
unit: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal -m "not slow and not gpu and not nightly"

# Thousands of drawn configs, run files, data files and folder trees, new ones each time.
nightly: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal -m nightly

# Needs the advisories of pypi.org; strict: a package that could not be looked up is a failure, not a pass.
audit: $(READY)
	test -x $(VENV)/audit/bin/pip-audit || ($(PYTHON) -m venv $(VENV)/audit && $(VENV)/audit/bin/python -m pip install --quiet pip-audit)
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' > $(VENV)/audit/installed.txt
	$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip -r $(VENV)/audit/installed.txt

bench: $(READY)
	$(BIN)/python benchmarks/norm.py

# torch goes first and alone: a later step then keeps the build that is there.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch>=2.6,<2.14"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
