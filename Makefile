# make demo: set up, then upload, train for about a minute, sample.
# make test: set up, then lint, types, tests.
# make emulator: AWS on this machine, whose training jobs really run; CONTRIBUTING.md tells more.

PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-image emulator clean

# Two processes, so that what it shows is DistributedDataParallel.
demo: .venv/installed
	$(BIN)/sm-nanogpt upload-data
	job_id=$$($(BIN)/sm-nanogpt launch --instance local --preset cpu --processes-per-instance 2) && \
	$(BIN)/sm-nanogpt fetch-and-sample $$job_id

test: .venv/installed-for-tests .venv-contract/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/cfn-lint infra/template.yaml
	$(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal

emulator: .venv/installed-for-tests .venv-contract/installed
	@PYTHONPATH=tests:tests/contract $(BIN)/python tests/e2e/emulator.py

.venv/installed: pyproject.toml constraints.txt | .venv
	@echo "installing sm-nanogpt and torch into .venv; this takes a minute or two" >&2
	$(PIP_INSTALL) -e .
	touch $@

.venv/installed-for-tests: pyproject.toml constraints.txt | .venv
	@echo "installing sm-nanogpt and its tools into .venv; this takes a few minutes" >&2
	$(PIP_INSTALL) -e '.[test]'
	touch $@ .venv/installed

.venv:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
		echo "error: $$($(PYTHON) --version) is not 3.11 to 3.13: make PYTHON=python3.12 names another" >&2; \
		exit 2; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

# SageMaker's training toolkit, for tests/contract; it cannot share an environment with the SDK.
.venv-contract/installed: tests/contract/requirements.txt tests/contract/requirements-2.11.txt
	@echo "installing SageMaker's training toolkit into .venv-contract; this takes a minute" >&2
	$(PYTHON) -m venv .venv-contract
	.venv-contract/bin/pip install --quiet --disable-pip-version-check -r tests/contract/requirements.txt
	.venv-contract/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target .venv-contract/toolkit-of-2.11 -r tests/contract/requirements-2.11.txt
	touch $@

# The tests of train.py with the versions of the default training image (launcher/images.py).
test-image: .venv-image/installed
	.venv-image/bin/pytest -n 2 --dist worksteal tests/test_train_*.py

.venv-image/installed: pyproject.toml constraints.txt
	python3.13 -m venv .venv-image
	grep -v '^torch==' constraints.txt > .venv-image/constraints.txt
	.venv-image/bin/pip install --quiet --disable-pip-version-check \
		-c .venv-image/constraints.txt -e '.[test]' torch==2.10.0
	touch $@

clean:
	rm -rf .venv .venv-contract .venv-image build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
