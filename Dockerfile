# Shardmark on CPUs; Dockerfile.cuda is for GPUs.
#   docker build -t shardmark .
#   docker run --rm --shm-size 2g -u "$(id -u):$(id -g)" -v "$PWD:/work" shardmark run quickstart
# The default wheels of torch bring CUDA's libraries.  An index of torch's CPU wheels makes the image
# gigabytes smaller: --build-arg PIP_EXTRA_INDEX_URL=INDEX --build-arg CONSTRAINTS=
FROM python:3.13-slim-trixie

# `recipe.compile` has it compile kernels for the CPU.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

ARG PIP_EXTRA_INDEX_URL
ARG CONSTRAINTS=constraints.txt
COPY constraints.txt pyproject.toml README.md LICENSE /source/
COPY src /source/src
COPY examples /source/examples
WORKDIR /source
RUN pip install --no-cache-dir ${CONSTRAINTS:+-c "$CONSTRAINTS"} ".[all]"

ENV HOME=/tmp
WORKDIR /work
ENTRYPOINT ["shardmark"]
CMD ["--help"]
