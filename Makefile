PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TOOLS := $(VENV)/.tools
INSTALLED := $(VENV)/.installed
DEVELOPED := $(VENV)/.developed
COMPILED := $(VENV)/.compiled
BUILD_TOOLS := scikit-build-core nanobind cmake ninja
NATIVE := src/chairlift/kernels/cpu
NATIVE_SOURCES := CMakeLists.txt $(wildcard $(NATIVE)/csrc/*/*.*)
BUILD ?= build/native
# Instruction sets of the native kernels that are optimized: `host` compiles sooner, for tests on this CPU.
OPTIMIZE ?= all
LEAST_ISA := $(if $(filter x86_64,$(shell uname -m)),avx2,portable)
ARGS ?=
# A file's tests stay in one process: they share servers and models. The files with the fewest tests, which take longest, are not
# last. For a debugger: WORKERS=0.
WORKERS ?= logical
PYTEST := pytest -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
MAKEFLAGS += --no-print-directory
# The tools of the environment first; without one, those of the machine.
export PATH := $(abspath $(BIN)):$(PATH)
# Where it is set, each process compiles all modules that it imports, which takes 7 s of CPU time for transformers.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv native stub configure serve lesson test test-on-cluster docs-check fuzz fuzz-api fuzz-cost soak soak-attack test-pages test-clients findings load-test test-wheel test-install test-without-compiler test-triton sanitize sanitize-address sanitize-thread check format bench wheel release clean

help: ## This list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(DEVELOPED) $(COMPILED) ## Create .venv with all tools and compile, if something changed.

# Python compiles the modules that are imported, when they are; pip would compile those of all packages.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# Editable, and pure Python: the library lies beside the sources, where `native` puts it.
EDITABLE := --no-build-isolation --config-settings wheel.cmake=false --config-settings editable.mode=inplace -e

$(TOOLS): constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) pip  # That of Python 3.11 takes more than twice as long for all packages.
	@$(PIP_INSTALL) $(BUILD_TOOLS)
	@touch $@

$(INSTALLED): pyproject.toml constraints.txt $(TOOLS)
	@echo "Installing torch and Chairlift into $(VENV). The first time takes minutes."
	@$(PIP_INSTALL) torch $(EDITABLE) .
	@touch $@

$(DEVELOPED): pyproject.toml constraints.txt $(TOOLS)
	@echo "Installing torch, Chairlift with extras, clients and development tools into $(VENV)."
	@$(PIP_INSTALL) torch $(EDITABLE) '.[dev]'
	@touch $(INSTALLED) $@

$(COMPILED): $(TOOLS) $(NATIVE_SOURCES)
	@if $(MAKE) configure; then $(MAKE) native; else rm -f $(NATIVE)/_native*.so; \
	  echo "No native kernels: CMake found no working C++ compiler (above). The slower torch kernels will be used." >&2; fi
	@touch $@

configure:
	@cmake -S . -B $(BUILD) -G Ninja -DCHAIRLIFT_OPTIMIZE=$(OPTIMIZE) -DPython_EXECUTABLE=$$(command -v $(BIN)/python) > /dev/null

native: configure ## Compile the native kernels into the source tree (`make venv` does, if a C++ source changed).
	@MAKEFLAGS= cmake --build $(BUILD) --parallel  # Ninja cannot use make's job server.
	@for so in $(BUILD)/_native*.so; do cp $$so $(NATIVE)/.new && mv $(NATIVE)/.new $(NATIVE)/$$(basename $$so); done

stub: native ## Write the types of the extension, _native.pyi, from its compiled bindings.
	$(BIN)/python -m nanobind.stubgen -q -m chairlift.kernels.cpu._native -o $(NATIVE)/_native.pyi
	$(BIN)/ruff check --quiet --fix $(NATIVE)/_native.pyi
	$(BIN)/ruff format --quiet $(NATIVE)/_native.pyi

serve: $(INSTALLED) $(COMPILED) ## Serve the default model on http://127.0.0.1:8000 (options: ARGS="--port 8001").
	$(BIN)/chairlift serve $(ARGS)

lesson: $(INSTALLED) $(COMPILED) ## Learn batching: serve the same requests in static batches and paged, and compare (ARGS="--seed 1").
	$(BIN)/chairlift lesson $(ARGS)

test: venv ## Run the tests (a choice of them: ARGS="tests/core -k preempt").
	$(BIN)/python -m $(PYTEST) $(ARGS)

# Most other tests of the API are of bodies that the front end rejects or translates, which it does without its replicas.
ON_CLUSTER := server_api api_chat api_completions api_messages api_matrix api_failures explain_api lora_api pooling_api request_ids

test-on-cluster: venv ## Run tests of the API on a cluster with one replica in this process.
	TEST_ON_CLUSTER=1 $(BIN)/python -m $(PYTEST) $(ON_CLUSTER:%=tests/server/api/test_%.py) $(ARGS)

docs-check: venv ## Run the commands of README and guides whose output is shown, and compare it (ARGS="README.md").
	$(BIN)/python -m tools.docs_check $(ARGS)

fuzz: venv ## Fuzz model files, option files and batch lines for five minutes (ARGS="--minutes 30 --target safetensors").
	$(BIN)/python -m tools.fuzz $(ARGS)

fuzz-api: venv ## Call a server with 2,000 cases that schemathesis makes of its OpenAPI (ARGS="--cases 20000").
	$(BIN)/python -m tools.fuzz_api $(ARGS)

fuzz-cost: venv ## Measure what large requests cost in every field, also times n, prompts and beams (ARGS="--endpoint chat").
	$(BIN)/python -m tools.fuzz_cost $(ARGS)

soak: venv ## Serve calls of every kind for 30 minutes, and see that nothing is left of them (ARGS="--minutes 5").
	$(BIN)/python -m tools.soak $(ARGS)

soak-attack: venv ## Serve a normal load of one key beside costly calls of another one for 20 minutes (ARGS="--minutes 5").
	$(BIN)/python -m tools.soak_attack $(ARGS)

test-wheel: wheel ## Install dist/*.whl in an environment without Chairlift or a compiler, and try its kernels.
	.ci/with-package build/installed/wheel dist/*.whl .ci/try_native.py
	CHAIRLIFT_CPU_ISA=$(LEAST_ISA) .ci/with-package build/installed/wheel dist/*.whl .ci/try_native.py

test-install: wheel ## Install dist/*.whl in an empty environment, without extras or a compiler, and ask its server.
	.ci/empty-install build/installed/empty dist/*.whl

test-pages: venv ## Test the pages in Chromium, which is installed if it is missing (ARGS=--screenshots also writes docs/images).
	@.ci/find-chromium > /dev/null
	$(BIN)/python -m pytest tests/pages $(ARGS)

CLIENTS := llm langchain-openai pydantic-ai-slim[openai] openai-agents litellm dspy haystack-ai
# Each of these needs an older version of the package openai than others accept.
OLDER_CLIENTS := instructor llama-index-llms-openai-like
OLDER_CHECKS := $(addprefix tests/clients/check_,instructor.py llama_index.py)

test-clients: venv ## Let clients, frameworks and coding agents, unchanged, talk to a server (Linux, with npm).
	@for script in tests/clients/node/check_*; do tests/clients/with-node-clients $$script || exit 1; done
	@for context in 32768 40960; do \
	  SCRIPTED_MAX_MODEL_LEN=$$context tests/clients/with-node-clients tests/clients/node/check_coding_agents.py claude qwen || exit 1; done
	@for script in $(filter-out %/check_lm_eval.py $(OLDER_CHECKS),$(wildcard tests/clients/check_*.py)); do \
	  tests/clients/with-clients "$(CLIENTS)" $$script || exit 1; done
	tests/clients/with-clients "$(CLIENTS)" examples/langchain_chat.py
	@for script in $(OLDER_CHECKS); do tests/clients/with-clients "$(OLDER_CLIENTS)" $$script || exit 1; done
	tests/clients/with-clients "lm-eval[api]" tests/clients/check_lm_eval.py

findings: ## Run findings/*.sh, which try released packages without Chairlift: name, seconds and result of each (minutes).
	@failed=0; for script in findings/*.sh; do \
	  start=$$(date +%s); result=unchanged; output=$$($$script 2>&1) || { result="changed, or failed:"; failed=1; }; \
	  printf '%-45s %4d s  %s\n' $$script $$(($$(date +%s) - start)) "$$result"; \
	  test "$$result" = unchanged || echo "$$output"; done; exit $$failed

load-test: venv ## Put a server under guidellm's load: 8 streams, 64 requests.
	tests/clients/with-clients guidellm -m guidellm run --disable-progress --output kind=console \
	  --backend kind=openai_http,target=CHAIRLIFT_URL,model=smollm2-135m-instruct,max_tokens=48 \
	  --profile kind=concurrent,streams=8 --constraint kind=max_requests,count=64 \
	  --data kind=json_file,path=tests/clients/prompts.json

# Other tests name their kernels, or do not depend on the kernels that were built. Of some files, these are a choice of
# those that compute or plan.
CLI_TESTS := serve_imports_no_laboratory_or_slow_library_and_ends_on_sigterm generate_prints_the_answers_in_order \
  bench_throughput_prints_a_table_or_one_json_line
PLAN_TESTS := the_command_starts_what_was_planned torch_kernels_need_more_memory_than_a_quantized_file \
  a_calibrated_device_predicts_the_speed the_default_memory_is_that_of_serve
LLM_TESTS := the_capital_of_france chat_uses_the_template_and_stops_by_itself a_seed_gives_the_same_answer_in_any_batch \
  logprobs_of_output_and_prompt
DISK_TESTS := answers_after_a_restart_are_the_same a_conversation_goes_on_after_a_restart_with_the_same_bits_of_state
WITHOUT_KERNELS = $(addprefix tests/,$(CLI_TESTS:%=cli/test_cli.py::test_%) $(PLAN_TESTS:%=cli/test_cli_plan.py::test_%) \
  $(addprefix engine/startup/test_,draft_model.py loaded_model.py required_memory.py token_budget.py) \
  $(LLM_TESTS:%=engine/test_llm.py::test_%) engine/test_async_llm.py::test_concurrent_streams_return_the_same_answers_as_single_ones \
  $(DISK_TESTS:%=engine/test_disk_prefix_cache.py::test_%) loading/test_loading_quantized.py \
  worker/test_worker_token_masks.py) \
  $(wildcard tests/kernels/test_kernels_native_*.py)

test-without-compiler: venv ## Install without a compiler, and run the tests that can differ (a choice: ARGS=...).
	.ci/with-package build/installed/pure . -m $(PYTEST) $(or $(ARGS),$(WITHOUT_KERNELS))

# Not in constraints.txt: torch with CUDA requires another exact version, with which TRITON=3.7.1 tests torch 2.13's.
TRITON ?= 3.9.0
TRITON_FOLDER := build/triton-$(TRITON)
WITH_TRITON = PYTHONPATH=$(TRITON_FOLDER) $(BIN)/python -m

$(TRITON_FOLDER): | $(TOOLS)
	@echo "Installing Triton $(TRITON) into $@, which takes about 1 GB."
	@rm -rf $@.new && $(PIP_INSTALL) --no-deps --target $@.new triton==$(TRITON) && mv $@.new $@ && touch $@

test-triton: venv $(TRITON_FOLDER) ## Test the Triton kernels without a GPU: interpreted, compiled, and the benchmark of GPUs in small.
	TRITON_INTERPRET=1 $(WITH_TRITON) $(PYTEST) tests/triton_set $(ARGS)
	$(WITH_TRITON) $(PYTEST) tests/triton_compile
	$(WITH_TRITON) benchmarks.gpu --interpret

sanitize: sanitize-address sanitize-thread ## Test the native kernels in C++, under sanitizers: addresses, undefined behaviour, threads.

sanitize-address: KIND = address,undefined
sanitize-thread: KIND = thread
sanitize-address sanitize-thread: sanitize-%: $(TOOLS)
	@cmake -S . -B build/sanitized-$* -G Ninja -DCHAIRLIFT_SANITIZE=$(KIND) > /dev/null
# The other targets wait for the environment, so this compilation has the lowest priority.
	@MAKEFLAGS= nice -n 19 cmake --build build/sanitized-$* --parallel
	@build/sanitized-$*/kernel_tests

check: venv ## Lint, format, types, import contracts, lines of each package.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/line_budgets.py

format: venv ## Let ruff rewrite what it can.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv ## Throughput of 64 requests at once on the default model.
	$(BIN)/chairlift bench throughput $(ARGS)

release: venv ## Build the source package, wheels for CPython 3.11 to 3.13 (with Docker) or this one, and check their metadata.
	@rm -rf dist && $(PIP_INSTALL) build cibuildwheel twine
	$(BIN)/python -m build --sdist --no-isolation
	if docker info > /dev/null 2>&1; then $(BIN)/cibuildwheel --output-dir dist; \
	  else echo "Docker does not run: only the wheel for this Python." >&2; $(MAKE) wheel; fi
	$(BIN)/twine check --strict dist/*

wheel: venv ## Build dist/*.whl, native kernels included.
	@rm -f dist/*.whl
	MAKEFLAGS= $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --config-settings build-dir=$(BUILD) \
	  --config-settings cmake.define.CHAIRLIFT_OPTIMIZE=$(OPTIMIZE) --wheel-dir dist .

clean: ## Remove what make made.
	rm -rf $(VENV) build dist $(NATIVE)/_native*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
