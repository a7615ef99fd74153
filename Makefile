# make demo: set up, then upload, train for about a minute, sample.
# make test: set up, then lint, types, tests.

PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test clean

demo: .venv/installed
	$(BIN)/sm-nanogpt upload-data
	job_id=$$($(BIN)/sm-nanogpt launch --instance local --preset cpu --processes-per-instance 2) && \
	$(BIN)/sm-nanogpt fetch-and-sample $$job_id

test: .venv/installed-for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal

.venv/installed: pyproject.toml constraints.txt | .venv
	@echo "installing sm-nanogpt and torch into .venv; this takes a minute or two" >&2
	$(PIP_INSTALL) -e .
	touch $@

.venv/installed-for-tests: pyproject.toml constraints.txt | .venv
	@echo "installing sm-nanogpt and its tools into .venv; this takes a few minutes" >&2
	$(PIP_INSTALL) -e '.[test]'
	touch $@ .venv/installed

.venv:
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
