# An image of llamarl for CPUs, or for NVIDIA GPUs, whose libraries come with the wheels of torch. docs/scaling.md says how to use it.
#
#   docker build -t llamarl .                              # for CPUs
#   docker build -t llamarl --build-arg TORCH_INDEX= .     # for GPUs: pip's own index, whose torch for Linux is built for CUDA
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS wheel
WORKDIR /source
COPY setup.cfg pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md ./
COPY llamarl llamarl
COPY executors executors
COPY conf conf
COPY recipes recipes
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:${PYTHON}-slim-bookworm
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Extras of setup.cfg, such as [tensorboard,math].
ARG EXTRAS=
# The kernels in C and in Triton are compiled on the machine that runs them.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 llamarl \
    && install --directory --owner=llamarl --group=llamarl /llamarl /llamarl/runs
USER 1000
WORKDIR /llamarl
ENV PATH=/llamarl/.venv/bin:$PATH
# hadolint ignore=DL3013
RUN python -m venv .venv \
    && pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$TORCH"
COPY --from=wheel /wheel /wheel
# The wheel says which versions.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "$(echo /wheel/*.whl)$EXTRAS" "torch==$TORCH"
COPY --chown=llamarl:llamarl recipes recipes
# docker run llamarl COMMAND KEY=VALUE ...
ENTRYPOINT ["llamarl"]
CMD ["--help"]
