# `make run` and `make test` need Python 3.11 or newer and a package index; they set up .venv first.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq -c $(CONSTRAINTS)
TO_RUN := $(VENV)/.ready-to-run
TO_DEVELOP := $(VENV)/.ready-to-develop

.DEFAULT_GOAL := help
.PHONY: help run test test-all test-part test-faults test-interop test-next test-cells rotate test-gpu speedrun lint format check docs wheel clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

run: $(TO_RUN) ## train recipes/quickstart.toml, then let it write
	$(BIN)/trainer run recipes/quickstart.toml
	$(BIN)/trainer generate runs/quickstart --prompt 'import ' --prompt 'def __init__(self, ' --temperature 0.7

test: $(TO_DEVELOP) ## run the test suite: every behaviour once, 8 minutes on two cores
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: test ## run every test: `test`, then all parts of tests/parts.toml (an hour)
	$(BIN)/python -m tests.rotation run all

test-part: $(TO_DEVELOP) ## run parts of `test-all`: make test-part PART=3 (without PART: list them)
	$(BIN)/python -m tests.rotation $(if $(PART),run $(PART),list)

test-faults: $(TO_DEVELOP) ## kill, stop and damage runs: the parts of `test-all` named faults
	$(BIN)/python -m tests.rotation run faults

test-interop: $(TO_DEVELOP) ## take a small model through every format: the part of `test-all` named interop
	$(BIN)/python -m tests.rotation run interop

test-next: $(TO_DEVELOP) ## run the parts of `test-all` that this change asks for
	$(BIN)/python -m tests.rotation run next

test-cells: $(TO_DEVELOP) ## compare random plans with one process: make test-cells CELLS="0 100" (resumes)
	$(BIN)/python -m tests.cells run $(or $(CELLS),0 2000)

rotate: $(TO_DEVELOP) ## begin a change: record where the last one ended
	$(BIN)/python -m tests.rotation advance

test-gpu: $(TO_DEVELOP) ## run the kernels for real, where there is a GPU
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "torch sees no GPU here")'
	$(BIN)/python -m pytest -rs tests/kernels/gpu

speedrun: $(TO_DEVELOP) ## race an optimizer to a loss on a CPU, 10 seeds: make speedrun ROW=muon
	$(BIN)/python benchmarks/speedrun race $(or $(ROW),$(error ROW is the name of a recipe in recipes/speedrun))

lint: $(TO_DEVELOP) ## ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(TO_DEVELOP) ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint test ## what every change must pass

docs: $(TO_RUN) ## make recipes/schema.json and docs/reference anew
	$(BIN)/trainer schema > recipes/.schema.json
	mv recipes/.schema.json recipes/schema.json
	$(BIN)/trainer docs --write docs/reference

wheel: $(TO_DEVELOP) ## build dist/*.whl
	rm -rf build dist
	$(BIN)/python -m build --wheel

clean: ## remove the environment and what was built
	rm -rf $(VENV) build dist *.egg-info

# torch first: what needs it must find it there, whichever build the index offers.
$(TO_RUN): pyproject.toml setup.py $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12 ...")'
	@echo 'setting up $(VENV): the first time this takes some minutes, most of them for torch'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) -e .
	@touch $@

$(TO_DEVELOP): $(TO_RUN)
	@$(PIP) -e '.[dev]'
	@touch $@
