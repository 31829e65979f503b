# Everything from a bare clone: needs python3 (3.11 to 3.13) with its venv module, and make.
# `make help` lists the targets and the variables.

PYTHON      ?= python3
VENV        ?= .venv
BUILD       ?= build
STEPS       ?= 20
SIZE        ?= tiny
# Which PyTorch: a requirement such as torch==2.13.0, and the package index to take it from.
TORCH       ?=
TORCH_INDEX ?=

CPU_INDEX   := https://download.pytorch.org/whl/cpu
BIN         := $(VENV)/bin
USER_READY  := $(VENV)/.installed
DEV_READY   := $(VENV)/.installed-dev
PEER_READY  := $(VENV)/.installed-parity
LOWEST      := $(VENV)-lowest
LOWEST_READY := $(LOWEST)/.installed
# Together they use every package that is needed at run time.
LOWEST_TESTS := $(foreach name,adapter_files adapters cli_views tokenization combine_gradients config doctor hub journal judge \
	loading lock model multimodal notebooks plots rollout run samples sft chat_template, \
	$(wildcard tests/test_$(name).py tests/*/test_$(name).py))
NOTEBOOKS   := $(sort $(wildcard notebooks/[0-9]*.ipynb))

# Compiled modules are kept: each process of tests, and each kernel it starts, would compile the whole project again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run notebooks lab test test-browser test-lowest test-all check bench docs format clean
.DELETE_ON_ERROR:

help: ## list the targets and the variables
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 14
	@echo
	@echo 'Variables, e.g. make test PYTHON=python3.12'
	@echo '  PYTHON       interpreter that makes the environment      ($(PYTHON))'
	@echo '  VENV         where the environment lives                 ($(VENV))'
	@echo '  TORCH        PyTorch to install, e.g. torch==2.13.0      (the range in pyproject.toml)'
	@echo '  TORCH_INDEX  index to take it from, e.g. $(CPU_INDEX)'
	@echo '               unset, a wheel in a pip find-links folder is taken first; then, on Linux without an'
	@echo '               NVIDIA driver, the CPU build from that index; else what PyPI has (with CUDA: 3 GB)'
	@echo '  STEPS        steps that make bench measures              ($(STEPS))'
	@echo '  SIZE         work that make bench gives to TRL as well   ($(SIZE); 0.6b, 1.7b, 8b and 8b-long need a GPU)'

run: $(USER_READY) ## execute every notebook on the demo; rendered pages in build/
	$(BIN)/python -m grpo_nb.dev.render --out $(BUILD) $(NOTEBOOKS)

notebooks: $(USER_READY) ## execute every notebook on the demo and keep its outputs in it, for readers on a code host
	$(BIN)/python -m grpo_nb.dev.committed $(NOTEBOOKS)

lab: $(USER_READY) ## copies of the notebooks in lab/, which git ignores, opened in JupyterLab
	$(BIN)/python -m grpo_nb notebooks lab
	@if [ "$$(id -u)" = 0 ]; then echo 'JupyterLab runs as root (--allow-root): its address and token open all of this machine'; fi
	$(BIN)/jupyter lab $$(test "$$(id -u)" = 0 && echo --allow-root) lab/$(notdir $(firstword $(NOTEBOOKS)))

# A test file stays in one process; each process holds PyTorch, about 1 GB. The longest come first (tests/conftest.py);
# pytest-xdist's own order would put the files with the fewest tests last, and those are the longest.
test: check ## format, lint, types and the quick tests, in up to four processes
	$(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-browser: $(DEV_READY) ## every browser test, slow or not: JupyterLab in Chromium; screenshots in build/
	$(BIN)/python -m pytest -m browser tests

test-lowest: $(LOWEST_READY) ## quick tests of each package's use, on the lowest versions that pyproject.toml allows
	@if [ -s $(LOWEST)/constraints.txt ]; then $(LOWEST)/bin/python -m pytest -m 'not slow' $(LOWEST_TESTS); fi

test-all: check $(PEER_READY) test-lowest ## the same, the slow tests, those against TRL and test-lowest
	$(BIN)/python -m pytest -m 'slow or not slow'

check: $(DEV_READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(PEER_READY) ## time a step by phase and beside TRL's, what the dashboard costs, and what a long run costs
	$(BIN)/python -m grpo_nb.dev.bench --steps $(STEPS)
	$(BIN)/python -m grpo_nb.dev.peer --size $(SIZE) --steps $(STEPS)
	$(BIN)/python -m grpo_nb.dev.peer_sft --size $(SIZE) --steps $(STEPS)
	$(BIN)/python -m grpo_nb.dev.live_bench
	$(BIN)/python -m grpo_nb.dev.live_growth
	$(BIN)/python -m grpo_nb.dev.growth_bench

docs: $(USER_READY) ## pages that need no network: the notebooks executed afresh, and the reference, in build/docs
	$(BIN)/python -m grpo_nb.dev.docs $(BUILD)/docs $(NOTEBOOKS)

format: $(DEV_READY) ## format the code and mend what lint can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/jupytext --sync notebooks/*.ipynb

clean: ## remove build/ and caches; keeps the environment and every run
	rm -rf $(BUILD) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamps are newer than pyproject.toml while the environment is as it says.
$(USER_READY): pyproject.toml | $(BIN)/python
	@echo 'installing into $(VENV): about 1.5 GB, a few minutes the first time'
	$(install-torch)
	$(BIN)/python -m pip install --quiet --editable '.[notebook,judge,gguf]'
	@touch $@

$(DEV_READY): pyproject.toml $(USER_READY)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

$(PEER_READY): pyproject.toml $(DEV_READY)
	$(BIN)/python -m pip install --quiet --editable '.[parity]'
	@touch $@

# Old versions have no wheels for new Pythons, so they go with the oldest one.
$(LOWEST_READY): pyproject.toml tests/support/lowest.py $(DEV_READY)
	@rm -rf $(LOWEST) && $(PYTHON) -m venv $(LOWEST)
	@if $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then \
		$(BIN)/python tests/support/lowest.py pyproject.toml >$(LOWEST)/constraints.txt || exit 1; \
		$(call torch-into,$(LOWEST)/bin,$(TORCH_LOWEST)); \
		$(LOWEST)/bin/python -m pip install --quiet --constraint $(LOWEST)/constraints.txt --editable '.[dev]' || exit 1; \
	else echo 'the lowest versions are tested on Python 3.11 alone: make test-lowest PYTHON=python3.11'; fi
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# PyTorch goes in first: installed with the rest, pip would take PyPI's newest, which on Linux brings CUDA.
define install-torch
	@$(call torch-into,$(BIN),$(or $(TORCH),$(TORCH_RANGE)))
endef
# 1: the environment's bin, 2: the requirement; a shell command.
define torch-into
if [ -n "$(TORCH)$(TORCH_INDEX)" ]; then \
	$(1)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(2)' || exit 1; \
elif $(1)/python -m pip install --quiet --no-index --no-deps '$(2)' 2>/dev/null; then \
	echo 'PyTorch: found on this machine'; \
elif [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
	$(1)/python -m pip install --quiet --retries 1 --timeout 30 --index-url $(CPU_INDEX) '$(2)' \
	|| echo 'PyTorch: the CPU index did not answer; taking what PyPI has, which may be 3 GB'; \
fi
endef
TORCH_RANGE = $(shell sed -nE 's/^ *"(torch[<>=][^"]*)".*/\1/p' pyproject.toml)
TORCH_LOWEST = $(subst >=,==,$(firstword $(subst $(comma), ,$(TORCH_RANGE))))
comma := ,
