# Everything here needs no more than make and a Python of at least 3.10 with its venv module; the rest is installed into
# $(VENV) by whatever target needs it first. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
NP ?= 2
TORCH ?= torch==2.13.0
# Builds of PyTorch for CPUs. PyPI's own for Linux come with several gigabytes of CUDA; where this address cannot be
# reached, or with TORCH_INDEX= on the command line, those are taken.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TRAIN_ARGUMENTS ?= --epochs 20
PYTEST_ARGUMENTS ?=
BENCH_ARGUMENTS ?=

BIN := $(VENV)/bin
# As if the environment had been activated: `python` and `horovodrun` are its own for whatever recipes start.
export PATH := $(abspath $(BIN)):$(PATH)
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
RESULTS := benchmarks/results

# One empty file for each step of the installation, so that a second call has nothing to do.
STAMPS := $(VENV)/stamps
HAVE_VENV := $(STAMPS)/venv
HAVE_TORCH := $(STAMPS)/$(subst =,-,$(TORCH))
HAVE_TRAIN := $(STAMPS)/train
HAVE_BENCH := $(STAMPS)/bench
HAVE_TEST := $(STAMPS)/test

.DEFAULT_GOAL := help
.PHONY: help train test lint bench docs clean

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

train: $(HAVE_TRAIN)  ## train a network on handwritten digits with two processes (NP=4: with four)
	$(BIN)/horovodrun -np $(NP) python examples/pytorch_mnist.py $(TRAIN_ARGUMENTS)

test: lint  ## lint, then run all tests
	$(BIN)/python -m pytest $(PYTEST_ARGUMENTS)

lint: $(HAVE_TEST)  ## check style, layout and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

bench: $(HAVE_BENCH)  ## measure collectives and training steps beside Gloo and DDP (under 10 minutes)
	mkdir -p $(RESULTS)
	$(BIN)/python benchmarks/collectives.py --np $(NP) --engine shm,tcp --peer gloo --idle 10 --seconds 0.2 \
		--json $(RESULTS)/collectives.json --plot $(RESULTS)/collectives.png $(BENCH_ARGUMENTS)
	$(BIN)/python benchmarks/training.py --np $(NP) --peer ddp --restarts 2 --rounds 3 \
		--json $(RESULTS)/training.json --plot $(RESULTS)/training.png
	@echo "also written: $(RESULTS)/collectives.json, collectives.png, training.json, training.png"

docs: $(HAVE_TEST)  ## check that what the documents point to exists and that their code parses
	$(BIN)/python -m pytest -q tests/examples/test_documents.py

clean:  ## remove what tools and runs left behind; the virtual environment stays
	rm -rf build dist checkpoints $(RESULTS) .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(HAVE_VENV):
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed: make PYTHON=..." if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# PyTorch alone, and few retries, since the address may be out of reach; what PyTorch needs comes with the project.
$(HAVE_TORCH): $(HAVE_VENV)
	$(PIP) install --no-deps --retries 1 --timeout 30 $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '$(TORCH)'
	@touch $@

$(HAVE_TRAIN): pyproject.toml $(HAVE_TORCH)
	$(PIP) install -e '.[torch,examples]'
	@touch $@

$(HAVE_BENCH): pyproject.toml $(HAVE_TORCH)
	$(PIP) install -e '.[torch,bench]'
	@touch $@

$(HAVE_TEST): pyproject.toml $(HAVE_TORCH)
	$(PIP) install -e '.[torch,examples,bench,test,lint]'
	@touch $@
