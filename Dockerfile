# The nvium server. It runs as an unprivileged user, and its file system may be read-only.
#   docker build .                                                          PyTorch's CPU build
#   docker build --build-arg TORCH_INDEX_URL=… .                            a build from another of PyTorch's indexes, for a GPU
#   docker build --build-arg TORCH_INDEX_URL= .                             the build that pip installs by default (CUDA)
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
# The modification time of every file, so that builds are reproducible.
ARG SOURCE_DATE_EPOCH=315532800

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
ARG SOURCE_DATE_EPOCH
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PATH=/opt/nvium/bin:$PATH
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /src
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/nvium

COPY constraints.txt ./
RUN grep '^torch==' constraints.txt > torch.txt \
    && { { [ -n "$TORCH_INDEX_URL" ] \
           && pip install --no-deps --timeout 30 --retries 1 --index-url "$TORCH_INDEX_URL" --requirement torch.txt; } \
         || pip install --constraint constraints.txt --requirement torch.txt; }

COPY pyproject.toml ./
RUN python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
      > requirements.txt \
    && pip install --constraint constraints.txt --requirement requirements.txt

# Remove PyTorch's tests and C++ headers; the image has no compiler.
RUN rm -rf /opt/nvium/lib/python3.*/site-packages/torch/{test,include,bin/test_*}

COPY . ./
# Compile the C++ kernels for every instruction set that the image may run on.
RUN pip install --no-deps . \
    && python -P -m nvium_core.engine.device.native \
    && pip uninstall --yes pip

# Compile byte code without timestamps. Python does not compare it with the sources, which never change in the image.
# Skip files that this Python version cannot parse.
RUN find /opt/nvium -name __pycache__ -prune -exec rm -r {} + \
    && python -m compileall -f -q --invalidation-mode unchecked-hash -x /py312_ /opt/nvium/lib \
    && find /opt/nvium -exec touch --no-dereference --date "@$SOURCE_DATE_EPOCH" {} +

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE}
ARG SOURCE_DATE_EPOCH
RUN useradd --create-home --uid 10001 nvium \
    && install --directory --owner nvium --group nvium /var/cache/nvium
COPY --from=build /opt/nvium /opt/nvium
ENV PATH=/opt/nvium/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/var/cache/nvium \
    XDG_CACHE_HOME=/var/cache/nvium \
    NVIUM_HOST=0.0.0.0 \
    NVIUM_PORT=8000
USER 10001:10001
WORKDIR /home/nvium
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=6 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ[\"NVIUM_PORT\"]}/health', timeout=4)"]
ENTRYPOINT ["nvium"]
CMD ["serve"]
