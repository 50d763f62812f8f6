# `make` lists what there is to make.

# The Python that makes the environments, 3.11 to 3.13. Set PYTHON to choose another than the first that is found.
# 3.11 comes first: the OTLP receiver that some tests need is there for no later one.
supported := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
ifndef PYTHON
PYTHON := $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,\
	$(shell $(name) -c '$(supported)' >/dev/null 2>&1 && echo $(name))))
endif

# Each has an environment in tools/engine_env.py and a folder in tests/engines. ENGINE=vllm restricts test-engines to one.
ENGINES := vllm sglang
ENGINE ?= $(ENGINES)
BIN := .venv/bin
INSTALLED := .venv/installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# One engine at a time: each takes what memory there is, and some of their tests wait for deadlines.
.NOTPARALLEL:
.PHONY: help venv demo demo-vllm test test-engines $(ENGINES:%=test-%) check generate bench clean python

help: ## List the targets
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) \
	  | while IFS='|' read -r target text; do printf '  make %-14s %s\n' "$$target" "$$text"; done

python:
	@$(or $(PYTHON),false) -c '$(supported)' || { echo 'Python 3.11 to 3.13 is needed: set PYTHON to one' >&2; exit 1; }

venv: $(INSTALLED) ## Make .venv, with this project (editable) and all that its development needs

# pip 25.1 is the first that knows --group.
$(INSTALLED): pyproject.toml | python
	@echo "making .venv with $$($(PYTHON) --version), less than a minute"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --upgrade 'pip >= 25.1'
	@$(BIN)/python -m pip install -qq --editable . --group dev
	@touch $@

demo: $(INSTALLED) ## Run a small cache of three tiers for half a minute, and see what is measured
	@$(BIN)/kvcache-otel demo --seconds 30 $(ARGS)

demo-vllm: $(INSTALLED) ## The same on a real vLLM with three cache tiers on the CPU (3.3 GB at first)
	@python="$$($(BIN)/python tools/engine_env.py vllm)" && exec "$$python" -m examples.vllm_cpu $(ARGS)

test: $(INSTALLED) ## Run the tests that need no engine
	$(BIN)/python -m pytest -m 'not engine' $(ENGINES:%=--ignore=tests/engines/%) $(ARGS)

test-engines: $(ENGINE:%=test-%) ## Run the tests against real engines, each in its own environment (6 GB at first)

# Not the folders of the other engines: they cannot even be imported here.
$(ENGINES:%=test-%): test-%: $(INSTALLED)
	@python="$$($(BIN)/python tools/engine_env.py $*)" && set -x \
	  && KVCACHE_OTEL_REQUIRE=$*,prometheus,otlp "$$python" -m pytest -m engine \
	  $(patsubst %,--ignore=tests/engines/%,$(filter-out $*,$(ENGINES))) $(ARGS)

check: $(INSTALLED) ## Check format, lint, types, and that what is generated fits the catalogue
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright
	$(BIN)/python tools/generate.py --check

generate: $(INSTALLED) ## Generate code and documentation from the catalogue
	$(BIN)/python tools/generate.py

bench: $(INSTALLED) ## Run the benchmarks; the first needs a GPU, or says that there is none, the last two need a real engine
	$(BIN)/python -m benchmarks.gpu_timing
	$(BIN)/python -m benchmarks.bench_hot_path $(ARGS)
	$(BIN)/python -m benchmarks.bench_harvester $(ARGS)
	$(BIN)/python -m benchmarks.bench_events $(ARGS)
	@python="$$($(BIN)/python tools/engine_env.py vllm)" && set -x && "$$python" -m benchmarks.bench_vllm_manager $(ARGS)
	@python="$$($(BIN)/python tools/engine_env.py sglang)" && set -x && "$$python" -m benchmarks.bench_sglang_cache $(ARGS)

clean: ## Remove .venv; engine environments stay in their cache
	rm -rf .venv
