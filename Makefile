# Each target makes the virtual environment if it is missing. UV reads no pip configuration: where PIP_FIND_LINKS names a
# folder of wheels, it is passed on; elsewhere the CPU build of torch comes from PyTorch's own index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
UV_VERSION := 0.13.9
EXTRAS := service-cpu,ray,embedded-redis,trainer,trackers,plots,tracing,dev
TORCH_SOURCE := $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--torch-backend=cpu)
export VLLM_NO_USAGE_STATS := 1
export HF_HUB_OFFLINE := 1

.PHONY: install demo test test-slow check-monitoring screenshots chaos lint format bench bench-trainer lock clean

install: $(READY)

$(READY): pyproject.toml requirements/constraints-cpu.txt requirements/cpu-overrides.txt
	@echo "installing into $(VENV), which takes some minutes the first time"
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet uv==$(UV_VERSION)
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --compile-bytecode $(TORCH_SOURCE) \
		--constraint requirements/constraints-cpu.txt --override requirements/cpu-overrides.txt -e '.[$(EXTRAS)]'
	touch $@

demo: $(READY)
	$(BIN)/april demo $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -m 'not slow' $(ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow $(ARGS)

# Needs promtool and prometheus (Debian's package prometheus); what needs them is skipped without.
check-monitoring: $(READY)
	$(BIN)/python -m pytest tests/deploy/test_boards.py tests/deploy/test_compose.py $(ARGS)

# Needs Chromium (Debian's package chromium); with its fonts-inter the letters are those of the pictures in docs/images.
screenshots: $(READY)
	$(BIN)/python -m deploy.screenshots $(ARGS)

chaos: $(READY)
	$(BIN)/python -m tests.system.chaos $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-trainer: $(READY)
	$(BIN)/python -m benchmarks.trainer $(ARGS)

bench: $(READY)
	for file in benchmarks/[a-z]*.py; do $(BIN)/python -m benchmarks.$$(basename $$file .py) $(ARGS) || exit 1; done

lock: $(READY)
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip freeze --exclude-editable > requirements/constraints-cpu.txt

clean:
	rm -rf $(VENV)
