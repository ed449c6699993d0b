PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BUILD ?= build/native
NATIVE := src/chairlift/kernels/cpu
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv native serve test check format bench clean

help: ## This list.
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## Create .venv and install, if something changed.

$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch -e '.[dev]'
	@touch $@

native: ## Compile the native kernels in place, for work on them (`venv` compiles what it installs).
	@cmake -S . -B $(BUILD) -DPython_EXECUTABLE=$$(command -v $(BIN)/python) > /dev/null
	@cmake --build $(BUILD) --parallel
	@for so in $(BUILD)/_native*.so; do cp $$so $(NATIVE)/.new && mv $(NATIVE)/.new $(NATIVE)/$$(basename $$so); done

serve: venv ## Serve the default model on http://127.0.0.1:8000 (options: ARGS="--port 8001").
	$(BIN)/chairlift serve $(ARGS)

test: venv ## Run the tests (a choice of them: ARGS="tests/core -k preempt").
	$(BIN)/python -m pytest $(ARGS)

check: venv ## Lint, format, types, import contracts.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv ## Let ruff rewrite what it can.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv ## Throughput of 64 requests at once on the default model.
	$(BIN)/chairlift bench throughput $(ARGS)

clean: ## Remove what make made.
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
