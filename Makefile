# Everything for a machine without a GPU: `make demo`, `make test`, `make test-all`. PYTHON may be Python 3.11 or 3.12.

PYTHON ?= python3
DEMO_MODEL := models/SmolLM2-135M-Instruct
MODEL ?= $(DEMO_MODEL)
POLICY ?= streaming-llm
BUDGET ?= 1024
KV_MEMORY ?= 1073741824
PORT ?= 8000
PYTEST_ARGS ?=
# Test modules run side by side; an engine or server that a module starts is its own.
WORKERS ?= 2
BENCH_ARGS ?=
PYTHON312 ?= python3.12

# vLLM to test with. Another than the first has an environment of its own: `make setup VLLM=0.33`, `make test VLLM=0.33`.
VLLM ?= 0.32
VENV := .venv$(patsubst %,-%,$(filter-out 0.32,$(VLLM)))
BIN := $(VENV)/bin
# A stamp per stage; each is redone only when its own inputs changed.
ENGINE := $(VENV)/.engine
PACKAGE := $(VENV)/.package
EXTENSION := $(VENV)/.extension
SANITIZED := build/sanitized/.extension
OLDEST_TRITON := build/triton-3.6
PROMETHEUS := build/prometheus
GPU_SITE := build/gpu/bundle/site.tar.xz
SOURCES := $(wildcard csrc/*.cpp csrc/cpu/*.cpp csrc/cpu/*.h csrc/include/*/*.h)

.DEFAULT_GOAL := help
.PHONY: help setup wheel model demo serve test test-all nightly newest sanitize mutations lint format bench policies default-policy lm-eval peers suffixes prometheus browser gpu gpu-bundle gpu-rehearse gpu-machine oldest-triton clean

help:
	@echo "make setup | wheel | model | demo | serve | test | test-all | nightly | newest | sanitize | mutations | lint | format | bench | policies | default-policy | lm-eval | peers | suffixes | prometheus | browser | gpu | gpu-bundle | gpu-rehearse | oldest-triton | clean"

setup: $(EXTENSION)

$(BIN)/python:
	@echo "[setup] virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
	    || { echo "Python 3.11 or 3.12 is needed: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(ENGINE): kvpop_vllm/cpu_env.py | $(BIN)/python
	@$(BIN)/python -m kvpop_vllm.cpu_env $(VLLM)
	@touch $@

$(PACKAGE): pyproject.toml setup.py $(ENGINE)
	@echo "[setup] kvpop_vllm, in place"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-warn-conflicts \
	    --no-build-isolation -e '.[test,demo,dev,distill]'
	@touch $@

$(EXTENSION): $(SOURCES) $(PACKAGE)
	@echo "[setup] C++ kernels"
	@KVPOP_REQUIRE_EXT=1 $(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# A wheel with the C++ kernels, for environments with the same Python and torch. build/lib* may hold modules that are gone.
wheel: setup
	@rm -rf build/lib* dist/kvpop_vllm-*.whl
	@KVPOP_REQUIRE_EXT=1 $(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-build-isolation --no-deps -w dist .
	@echo "[wheel] $$(ls dist/kvpop_vllm-*.whl)"

model: setup
	@$(BIN)/kvpop fetch-demo-model $(DEMO_MODEL)

demo: model
	@$(BIN)/python examples/demo.py

serve: model
	$(BIN)/vllm serve $(MODEL) --kv-policy $(POLICY) --kv-budget $(BUDGET) \
	    --kv-cache-memory-bytes $(KV_MEMORY) --port $(PORT)

# The quick tests, 8 minutes on two cores; `test-all` runs all but the nightly ones, half an hour.
test: MARKS := not slow
test-all: MARKS := not nightly
test test-all: model
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q --durations=40 -n $(WORKERS) --dist loadscope --no-loadscope-reorder -m "$(MARKS)" tests $(PYTEST_ARGS)

# For the test of the inspect page, which is skipped without it. Debian's packages, as root.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { echo "[browser] Chromium" && \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null; }

nightly: lm-eval peers suffixes gpu-rehearse oldest-triton mutations newest
	@$(MAKE) --no-print-directory test-all MARKS=
	@$(MAKE) --no-print-directory gpu-rehearse VLLM=0.33

# Plants faults, and fails where no test finds one. MUTATIONS: words that files or faults must contain.
mutations: setup
	@$(BIN)/python tests/mutations.py $(MUTATIONS)

# Newest releases within the bounds of pyproject.toml, and beyond them. PACKAGES: names of dependencies, all if empty.
newest: model
	@WORKERS=$(WORKERS) $(BIN)/python tests/newest.py $(PACKAGES)

$(SANITIZED): $(SOURCES) setup.py $(PACKAGE)
	@mkdir -p $(@D)
	@echo 'int main() {}' | $(CXX) -fsanitize=address,undefined -x c++ - -o $(@D)/probe \
	    || { echo "$(CXX) cannot link with AddressSanitizer and UBSan: install its libasan and libubsan" >&2; exit 1; }
	@echo "[sanitize] C++ kernels with AddressSanitizer and UBSan"
	@KVPOP_SANITIZE=1 KVPOP_REQUIRE_EXT=1 $(BIN)/python setup.py --quiet build_ext
	@touch $@

sanitize: $(SANITIZED)
	@$(BIN)/python tests/kernels/sanitized.py $(PYTEST_ARGS)

$(OLDEST_TRITON)/.installed: $(PACKAGE)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target $(@D) "triton==3.6.0"
	@touch $@

# The tests of Triton's kernels with the oldest version that `make gpu` is for, next to the environment's own.
oldest-triton: setup $(OLDEST_TRITON)/.installed
	@PYTHONPATH=$(CURDIR)/$(OLDEST_TRITON) $(BIN)/python -m pytest -q tests/kernels/test_triton_*.py $(PYTEST_ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: model
	@$(BIN)/python benchmarks/decode.py $(BENCH_ARGS)

policies: model
	@$(BIN)/python benchmarks/policy_table.py $(BENCH_ARGS)

# Hours. What a model without a scorer should be served with: a calibration, all policies with and without its shares, the
# best four in longer texts, and the reasoner. Stopped at any time, the same command goes on. OUT: folder of results.
default-policy: OUT := build/default-policy
default-policy: POLICY_TABLE = $(BIN)/python benchmarks/policy_table.py --parts quality --rows 6 --needles 2 \
    --calibration $(OUT)/window $(OUT)/h2o $(OUT)/triattention
default-policy: model
	@$(BIN)/kvpop calibrate $(DEMO_MODEL) --out $(OUT)/window --policy streaming-llm --policies h2o triattention l2norm tova $(CALIBRATE_ARGS)
	@for policy in h2o triattention; do $(BIN)/kvpop calibrate $(DEMO_MODEL) --out $(OUT)/$$policy --policy $$policy \
	    --rounds 0 $(CALIBRATE_ARGS) || exit 1; done
	@$(POLICY_TABLE) --budget 512 $(BENCH_ARGS)
	@$(POLICY_TABLE) --budget 1024 --length 4096 --best 4 --equal bytes $(BENCH_ARGS)
	@$(POLICY_TABLE) --budget 1024 --length 8192 --best 4 --equal bytes $(BENCH_ARGS)
	@$(BIN)/python examples/reasoner/compare.py $(OUT)/reasoner --jobs 2

# On a machine with a GPU and vLLM, or with torch, Triton, transformers and a bundle: no environment is made, nothing is
# installed. PARTS: names of parts. OUT: folder of results.
gpu:
	@PYTHONPATH=benchmarks$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m gpu.run $(PARTS)

# What a GPU machine without vLLM lacks: packages, and the kernels that a rehearsal compiles. PYTHON312: a Python 3.12.
gpu-bundle:
	@test "$(VLLM)" = 0.32 || { echo "the bundle is of vLLM 0.32: leave VLLM out" >&2; exit 1; }
	@rm -rf build/gpu/bundle/caches.* build/gpu/rehearsal
	@$(MAKE) --no-print-directory gpu-rehearse
	@$(PYTHON) benchmarks/gpu/bundle.py caches

# `make gpu` on a pretended H100: with vLLM from the bundle, or installed (VLLM=0.33). PARTS: names of parts.
gpu-rehearse: gpu-machine $(if $(filter 0.32,$(VLLM)),$(GPU_SITE))
	@$(PYTHON) benchmarks/gpu/rehearse.py --vllm $(VLLM) --python312 $(PYTHON312) $(PARTS)

gpu-machine:
	@$(PYTHON) benchmarks/gpu/machine.py --vllm $(VLLM) --python312 $(PYTHON312)

$(GPU_SITE): benchmarks/gpu/bundle.py benchmarks/gpu/fatbin.py benchmarks/gpu/packages.txt
	@$(PYTHON) benchmarks/gpu/bundle.py site

# For the tasks of examples/lm_eval.
lm-eval: setup
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-warn-conflicts "lm-eval[api,math]==0.4.13"

# For drafts of the method `suffix`: its package, built for the installed torch without its own dependencies.
suffixes: setup
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-warn-conflicts cmake ninja "nanobind==2.9.2" grpcio-tools
	@PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps \
	    "arctic-inference==0.3.0"

peers: model
	@echo "[peers] transformers and kvpress in build/peers"
	@$(PYTHON) -m venv build/peers
	@build/peers/bin/python -m pip install -qq --disable-pip-version-check "$$($(BIN)/python -m pip freeze | grep '^torch==')"
	@build/peers/bin/python -m pip install -qq --disable-pip-version-check "kvpress[eval]==0.5.5" "transformers<5.3"

# Debian's package, unpacked for the test of examples/observability. Needs no root: package lists are fetched next to it.
prometheus: $(PROMETHEUS)/usr/bin/prometheus

$(PROMETHEUS)/usr/bin/prometheus:
	@echo "[prometheus] Debian's package in $(PROMETHEUS)"
	@mkdir -p $(PROMETHEUS)/lists/partial $(PROMETHEUS)/cache
	@cd $(PROMETHEUS) && for command in update "download prometheus"; do \
	    apt-get -qq -o Dir::State::Lists="$$PWD/lists" -o Dir::Cache="$$PWD/cache" -o APT::Sandbox::User= $$command \
	        || { echo "apt-get cannot fetch it: put prometheus and promtool on the PATH instead" >&2; exit 1; }; done
	@cd $(PROMETHEUS) && dpkg -x prometheus_*.deb . && rm -rf prometheus_*.deb lists cache

clean:
	rm -rf .venv .venv-* build dist *.egg-info kvpop_vllm/_C*.so .pytest_cache .ruff_cache .hypothesis
