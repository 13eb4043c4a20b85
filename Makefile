# Everything a working copy needs. Python >= 3.11 and make are enough; the rest is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PROTOC := PYTHONPATH=../$(VENV)/proto ../$(BIN)/python -m grpc_tools.protoc -I.
PROTO := layoutmap/core/proto/layout

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-newest test-oldest fuzz check format proto check-proto works pictures notebooks dist docs docs-serve bench clean

help: ## List these targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "  make %-12s %s\n", $$1, $$2 }'

setup: $(VENV)/.all ## Install everything for work on this repository into .venv (again only when pyproject.toml changed)

demo: $(VENV)/.demo ## Train a small GPT on 8 simulated devices; installs only JAX and Keras
	$(BIN)/python examples/train_gpt.py

test: $(VENV)/.all ## Run the tests, each law on a few cases; ARGS="core -- -k mesh" narrows it
	@$(BIN)/python tools/run_tests.py $(ARGS)

test-all: $(VENV)/.all $(VENV)/.xla-gpu $(VENV)/.trl ## Run all cases of all tests, with many examples of each property, as a release must pass them
	@$(BIN)/python tools/run_tests.py --all $(ARGS)

test-newest: $(BIN)/python ## Try the contracts on the newest torch, JAX, Keras and TensorFlow, before a release; ARGS="torch" or "torch==2.14.1"
	@$(BIN)/python tools/releases.py $(ARGS)

test-oldest: $(BIN)/python ## Try the contracts on the oldest releases that pyproject.toml allows, in .venv-oldest; ARGS="jax"
	@$(BIN)/python tools/releases.py --oldest $(ARGS)

fuzz: $(VENV)/.all ## Try the laws on drawn models of every library; SEED= the first (default: today), MINUTES= how long (default: 10)
	@$(BIN)/python tools/fuzz.py $(if $(SEED),--seed $(SEED)) --minutes $(or $(MINUTES),10) $(ARGS)

check: $(VENV)/.all check-proto ## Lint, format, types, imports, changelog, decisions, links
	@failed=; for check in "ruff check ." "ruff format --check ." pyright "pyright -p tools" lint-imports "python tools/check_files.py"; do \
	  echo "== $$check" && $(BIN)/$$check || failed="$$failed [$$check]"; \
	done; test -z "$$failed" || { echo "make check: failed:$$failed" >&2; exit 1; }

format: $(VENV)/.all ## Format, and fix what the linter can fix
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

proto: $(VENV)/.proto ## Regenerate layout_pb2.py and its types from layout.proto
	cd src && $(PROTOC) --python_out=. --pyi_out=. $(PROTO).proto

check-proto: $(VENV)/.proto ## Fail if layout_pb2.py is not what `make proto` makes
	@made=$$(mktemp -d) && trap 'rm -rf "$$made"' EXIT && cd src \
	&& $(PROTOC) --python_out="$$made" --pyi_out="$$made" $(PROTO).proto \
	&& diff -u $(PROTO)_pb2.py "$$made"/$(PROTO)_pb2.py && diff -u $(PROTO)_pb2.pyi "$$made"/$(PROTO)_pb2.pyi \
	&& echo "layout_pb2.py is what make proto makes"

works: $(VENV)/.all ## Write the tables of what works, from the results of the contract tests
	$(BIN)/python tools/works.py

pictures: $(VENV)/.all ## Make the pictures of the README and the site anew, from real output; needs Debian's chromium
	$(BIN)/python tools/pictures.py
	$(BIN)/python tools/site_pictures.py

notebooks: $(VENV)/.all ## Run the notebooks of the documentation, and write what they show
	PYTHONPATH=tests $(BIN)/python tests/test_notebooks.py

dist: $(VENV)/.all ## Build the wheel and the source distribution into dist/, and check their metadata
	rm -rf dist && $(BIN)/python -m build --quiet && $(BIN)/twine check --strict dist/*

docs: $(VENV)/.all ## Build the documentation as a site into site/; a warning or a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

docs-serve: $(VENV)/.all ## Show the site on this machine, made anew at each change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

bench: $(VENV)/.all ## Run the benchmarks, side by side with what they are compared with
	@for file in $(filter-out %models.py %measure.py,$(wildcard benchmarks/*.py)); do echo "== $$file" && $(BIN)/python "$$file" || exit 1; done

clean: ## Remove what was installed and made
	rm -rf $(VENV) .venv-oldest build dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip older than 25.1 knows no --group.
$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) here; fix: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "layoutmap needs Python >= 3.11, and $(PYTHON) is $$($(PYTHON) -V); fix: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade 'pip>=25.1'

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[jax,keras]'
	@touch $@

$(VENV)/.all: pyproject.toml | $(BIN)/python
	$(PIP) -e '.[jax,torch,keras,flax]' --group test --group jax --group tensorflow --group tensorboard --group torch --group tools --group docs --group dev
	$(PIP) --no-deps --group tf-keras --group keras-hub --group jax-models
	@touch $(VENV)/.demo $@

# In a folder of its own: where JAX finds the plugin, plans have XLA compile for GPUs, and most tests are of plans without.
$(VENV)/.xla-gpu: pyproject.toml | $(VENV)/.all
	rm -rf $(VENV)/xla-gpu
	$(PIP) --no-deps --target $(VENV)/xla-gpu $$($(BIN)/python -c 'import jaxlib; v = jaxlib.__version__; print(f"jax-cuda12-plugin=={v} jax-cuda12-pjrt=={v}")')
	@touch $@

$(VENV)/.trl: pyproject.toml | $(VENV)/.all
	$(PIP) --group trl
	@touch $@

$(VENV)/.proto: pyproject.toml | $(BIN)/python
	rm -rf $(VENV)/proto
	$(PIP) --target $(VENV)/proto --group proto
	@touch $@
