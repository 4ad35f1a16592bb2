# All packages and the command rl-train, for NVIDIA GPUs or for CPUs (TORCH=cpu):
#   docker build --build-arg TORCH=cu130 --tag rl-train .
#   docker run --gpus all --shm-size 16g rl-train
FROM python:3.12.12-slim-bookworm
ARG TORCH=cu130

# Triton compiles its launchers with gcc. The versions are those of this Debian release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/rl-train
COPY pyproject.toml ./
COPY packages packages
# The versions are the pins of pyproject.toml. torch brings CUDA's libraries; the driver is the host's.
RUN pip install --no-cache-dir uv==0.13.9 \
    && uv pip install --system --no-cache --torch-backend "$TORCH" \
        ./packages/parallel-layers ./packages/ckpt ./packages/parallel-models ./packages/megatron-utils \
        ./packages/hf-patches './packages/rl-models[transformers,peft,hub]' \
        './packages/rl-train[datasets,gateway,math-verify,plots,ray,tensorboard]'

RUN useradd --create-home --uid 1000 trainer
USER 1000
WORKDIR /home/trainer
CMD ["rl-train", "quickstart"]
