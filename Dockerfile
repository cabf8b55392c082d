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

# g++ is for graph.compile: torch.compile writes C++ for the CPU, and Triton compiles its launcher for a GPU. ssh is for an
# MPIJob of Kubernetes, whose pods mpirun reaches over it; its server runs only where a pod's command is sshd.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*

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

# The manifests of `onward submit --on kubernetes` have the number of the user. The keys are those that the MPI operator
# mounts: of root, though readable, which StrictModes refuses. Only its pods, NAME-worker-0 and so on, are reached so.
RUN useradd --create-home --uid 1000 onward && mkdir /work /onward && chown onward /work /onward
RUN printf '%s\n' 'Port 2222' 'HostKey /home/onward/.ssh/id_rsa' 'AuthorizedKeysFile /home/onward/.ssh/authorized_keys' \
        'StrictModes no' 'PidFile none' 'UsePAM no' 'PasswordAuthentication no' 'MaxStartups 1000' \
        > /etc/ssh/sshd_config.onward \
    && printf '%s\n' 'Host *-worker-*' '    Port 2222' '    StrictHostKeyChecking no' '    UserKnownHostsFile /dev/null' \
        '    LogLevel ERROR' > /etc/ssh/ssh_config.d/onward.conf
USER onward
ENV ONWARD_HOME=/home/onward/.onward
WORKDIR /work
ENTRYPOINT ["onward"]
CMD ["run", "squeezenet-digits"]
