# Two images: `serve`, SGLang with the plugin, and `loadtest`, the Locust harness. docs/container.md tells how to use them.
#
# Both bases are build arguments. Give a digest (name@sha256:...) where a build must be repeatable to the byte.
# SGLang's images have CUDA 13.0, for H200 (sm90) and B200 (sm100) alike; the node's driver must be 580 or newer.
ARG SGLANG_IMAGE=docker.io/lmsysorg/sglang:v0.5.23-runtime
ARG PYTHON_IMAGE=docker.io/library/python:3.12-slim-bookworm

# --- The wheel. Its stage, and whatever pip keeps, is left behind. ---
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY requirements/cpu.txt requirements/cpu.txt
COPY models/prompts.jsonl models/prompts.jsonl
COPY loadtest loadtest
COPY sglang_ext sglang_ext
# The build backend is pinned too; pip 25.3 reads the second name, older ones the first.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    PIP_CONSTRAINT=requirements/cpu.txt PIP_BUILD_CONSTRAINT=requirements/cpu.txt \
    python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

# --- The load test's packages, of the versions it is tested with. ---
FROM ${PYTHON_IMAGE} AS loadtest-packages
COPY requirements/cpu.txt /src/requirements/cpu.txt
COPY --from=wheel /dist /dist
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python3 -m venv /opt/loadtest \
    && wheel="$(echo /dist/*.whl)" \
    && /opt/loadtest/bin/pip install --no-cache-dir --constraint /src/requirements/cpu.txt "${wheel}[loadtest]" \
    && /opt/loadtest/bin/pip check \
    && /opt/loadtest/bin/pip uninstall --yes pip setuptools

FROM ${PYTHON_IMAGE} AS loadtest
ARG PYTHON_IMAGE
LABEL org.opencontainers.image.title="sglang-ext-loadtest" \
      org.opencontainers.image.description="Locust load test for SGLang endpoints with speculative decoding" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}"
COPY --from=loadtest-packages /opt/loadtest /opt/loadtest
RUN mkdir -p /usr/local/share/sbom \
    && /opt/loadtest/bin/python -m sglang_ext.sbom sglang-ext-loadtest > /usr/local/share/sbom/python.cdx.json \
    && groupadd --gid 10001 sglang \
    && useradd --uid 10001 --gid 10001 --create-home sglang \
    && install -d -o 10001 -g 10001 /results
# matplotlib and Locust keep small files in HOME; /tmp serves under a read-only root file system too.
ENV PATH=/opt/loadtest/bin:${PATH} \
    HOME=/tmp \
    PYTHONUNBUFFERED=1
WORKDIR /results
USER 10001:10001
ENTRYPOINT ["sglang-ext-loadtest"]
CMD ["--help"]

# --- The server. Last, so that a build without --target makes it. ---
FROM ${SGLANG_IMAGE} AS serve
ARG SGLANG_IMAGE
LABEL org.opencontainers.image.title="sglang-ext" \
      org.opencontainers.image.description="SGLang 0.5.23 with Carryover and ReaDy speculative decoding" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${SGLANG_IMAGE}"
USER 0
COPY --from=wheel /dist /opt/sglang-ext
# The plugin adds no dependency. A base with another SGLang, or one that only root can read, ends the build here.
# An arbitrary user id (OpenShift) is a member of group 0, hence the modes.
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --no-index --no-deps /opt/sglang-ext/*.whl \
    && rm -r /opt/sglang-ext \
    && mkdir -p /usr/local/share/sbom \
    && python3 -m sglang_ext.sbom sglang-ext > /usr/local/share/sbom/python.cdx.json \
    && groupadd --gid 10001 sglang \
    && useradd --uid 10001 --gid 10001 --create-home --home-dir /home/sglang sglang \
    && install -d -o 10001 -g 0 -m 2775 /home/sglang /home/sglang/.cache /var/cache/sglang
# SGLANG_CACHE_DIR holds every compiled kernel (Triton, FlashInfer, DeepGEMM, TileLang, Inductor): mount a volume there.
# What sglang-ext serve adds where it is not given: without a driver it must end, not serve on the CPU.
ENV HOME=/home/sglang \
    SGLANG_CACHE_DIR=/var/cache/sglang \
    SGLANG_EXT_SERVE_FLAGS="--device cuda --host 0.0.0.0" \
    PYTHONUNBUFFERED=1
WORKDIR /home/sglang
USER 10001:10001
RUN python3 -m sglang_ext.preflight && sglang-ext --version
EXPOSE 30000
# /health answers after a second at the earliest and gives up after 20. Loading and compiling may take half an hour.
HEALTHCHECK --start-period=30m --interval=30s --timeout=30s --retries=4 \
    CMD ["python3", "-m", "sglang_ext.healthcheck"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["sglang-ext", "serve"]
CMD ["--help"]
