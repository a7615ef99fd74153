# make demo: set up, then upload, train for about a minute, sample. TEXT=notes.txt names a text.
# make test: set up, then lint, types, tests. make test-all: also the slow ones, as CI runs it.
# make check: the same, but for tests that start a process, a server or a container, or import what
#             takes seconds.
# make affected: the tests of what differs from main, and of what imports it.
# make test-older-cpu: the tests of trainings, with the instructions of an older CPU.
# make gpu: checks and measures on this machine's GPU; examples/benchmarks/README.md tells more.
# make emulator: AWS on this machine, whose training jobs really run; CONTRIBUTING.md tells more.

PYTHON ?= python3
BIN := .venv/bin
# With uv on the PATH, an install takes seconds and follows uv's settings; `make UV= ...` uses pip.
# Both show on stderr what they download, which takes minutes.
# --no-compile leaves modules to be compiled on import; the tests import a small part of them.
UV := $(shell uv --version 2>/dev/null)
pip_install = $(if $(UV),uv pip install --python $(1)/bin/python,$(1)/bin/pip install \
	--disable-pip-version-check)

# With these, each process of the tests would compile all its imports again.
unexport PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED

.PHONY: demo test test-all check affected test-older-cpu test-image emulator gpu lint clean

# It follows what upload-data advises, and does it itself: `--preset auto` for a short text. Else two
# processes, so that what it shows is DistributedDataParallel.
demo: .venv/installed
	@advice=$$($(BIN)/sm-nanogpt upload-data $(if $(TEXT),"$(TEXT)") 2>&1 >/dev/null); status=$$?; \
	echo "$$advice" | grep -v "^next:" >&2; [ $$status -eq 0 ] || exit $$status; \
	case "$$advice" in \
	*"--preset auto"*) options="--preset auto" ;; \
	*) options="--preset cpu --processes-per-instance 2" ;; \
	esac; \
	job_id=$$($(BIN)/sm-nanogpt launch --instance local $$options) && \
	$(BIN)/sm-nanogpt fetch-and-sample $$job_id && \
	printf '%s\n' "" "That was a sample of job $$job_id. What you can type now:" \
		"  . .venv/bin/activate            # puts sm-nanogpt on your PATH, in this shell" \
		"  sm-nanogpt play latest          # try the model in your browser" \
		$(if $(TEXT),,"  make demo TEXT=notes.txt        # the same with a text of yours") >&2

pytest := $(BIN)/pytest -n auto --dist worksteal
slow := tests/slow tests/e2e/test_day.py tests/e2e/test_tutorial.py

test: left_out := $(addprefix --ignore=,$(slow))
test test-all: lint .venv-contract/installed
	$(BIN)/cfn-lint infra/template.yaml
	$(pytest) $(left_out)

# What the trainings of the tests compare does not depend on the instructions of the CPU. The tests
# of these files compare no numbers that it computed.
computes_nothing := checkpoint config container cores data device distributed errors files output \
	text watchdog

test-older-cpu: .venv/installed-for-tests
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2 $(pytest) -q -r '' tests/entry_point \
		$(computes_nothing:%=--ignore=tests/entry_point/test_%.py)

check: lint
	@echo "tests that start no process: a minute or two, on two cores" >&2
	$(pytest) -q -r '' --quick

affected: .venv/installed-for-tests
	@paths=$$($(BIN)/python tests/affected.py) && [ -z "$$paths" ] || \
		$(pytest) -q -r '' $(addprefix --ignore=,$(slow) tests/contract tests/e2e) $$paths

lint: .venv/installed-for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "types: seconds; the first time, and after an upgrade, a minute or two" >&2
	$(BIN)/mypy

emulator: .venv/installed-for-tests .venv-contract/installed
	@PYTHONPATH=.:tests:tests/contract $(BIN)/python tests/aws/emulator.py

# It uses the machine's own torch and installs nothing. STAGES, TEXT and NANOGPT are optional.
gpu:
	$(PYTHON) examples/benchmarks/gpu.py $(STAGES) --out $(or $(OUT),runs/gpu) \
		$(if $(TEXT),--text $(TEXT)) $(if $(NANOGPT),--nanogpt $(NANOGPT))

.venv/installed: pyproject.toml constraints.txt | .venv
	@echo "installing sm-nanogpt and torch into .venv; this takes a minute or two" >&2
	$(call pip_install,.venv) --compile -c constraints.txt -e . >&2
	touch $@

.venv/installed-for-tests: pyproject.toml constraints.txt | .venv
	@echo "installing sm-nanogpt and its tools into .venv; this takes a few minutes" >&2
	$(call pip_install,.venv) --no-compile -c constraints.txt -e '.[test]' >&2
	touch $@ .venv/installed

.venv:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 16))' 2>/dev/null || { \
		echo "error: $(PYTHON) is $$(command -v $(PYTHON) >/dev/null && $(PYTHON) --version 2>&1 || echo missing); Python 3.11 to 3.15 is" \
			"needed: make PYTHON=python3.12 names one" >&2; \
		exit 2; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

# SageMaker's training toolkit, for tests/contract; it cannot share an environment with the SDK.
.venv-contract/installed: tests/contract/requirements.txt tests/contract/requirements-2.11.txt
	@echo "installing SageMaker's training toolkit into .venv-contract; this takes a minute" >&2
	$(PYTHON) -m venv .venv-contract
	$(call pip_install,.venv-contract) --compile -r tests/contract/requirements.txt >&2
	$(call pip_install,.venv-contract) --no-deps --upgrade \
		--target .venv-contract/toolkit-of-2.11 -r tests/contract/requirements-2.11.txt >&2
	touch $@

# The tests of train.py with the versions of the default training image (launcher/machines.py).
test-image: .venv-image/installed
	.venv-image/bin/pytest -n 2 --dist worksteal tests/entry_point

.venv-image/installed: pyproject.toml constraints.txt Makefile
	python3.12 -m venv --clear .venv-image
	grep -vE '^(torch|triton|setuptools|cuda-.*|nvidia-.*)==' constraints.txt > .venv-image/constraints.txt
	$(call pip_install,.venv-image) -c .venv-image/constraints.txt -e '.[test]' torch==2.12.1 >&2
	touch $@

clean:
	rm -rf .venv .venv-contract .venv-image build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
