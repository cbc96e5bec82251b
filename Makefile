# make serve | test | check | format : each works on a fresh clone and makes .venv on its first run.

PYTHON ?= python3
# Options of `nvium serve`, such as SERVE_ARGS='--port 9000'; the environment's NVIUM_… count too.
SERVE_ARGS ?=
PYTEST_ARGS ?= -n auto --maxprocesses 8

# Where PyTorch comes from. Without a GPU its own index of CPU builds, falling back to what pip finds by itself
# (on Linux that is the CUDA build, which is large); with a GPU, or when set to nothing, what pip finds.
TORCH_INDEX_URL ?= $(if $(shell nvidia-smi -L 2>/dev/null),,https://download.pytorch.org/whl/cpu)

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)
SOURCES := nvium_core server loadtest tests

.PHONY: serve test check format clean

serve: .venv/serve.stamp
	$(BIN)/nvium serve $(SERVE_ARGS)

test: .venv/test.stamp
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: .venv/test.stamp
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile

format: .venv/test.stamp
	$(BIN)/ruff check --fix --exit-zero $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

.venv/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
		|| { echo 'nvium needs Python 3.11 or 3.12: make PYTHON=/path/to/python3.12' >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/torch.stamp: .venv/python.stamp constraints.txt
	$(if $(TORCH_INDEX_URL),$(PIP) install --no-deps --timeout 30 --retries 1 --index-url $(TORCH_INDEX_URL) $(TORCH) ||) \
		$(PIP) install --constraint constraints.txt $(TORCH)
	@touch $@

.venv/serve.stamp: .venv/torch.stamp pyproject.toml
	$(PIP) install --constraint constraints.txt --editable .
	@touch $@

.venv/test.stamp: .venv/torch.stamp pyproject.toml
	$(PIP) install --constraint constraints.txt --editable '.[test]'
	@touch $@ .venv/serve.stamp
