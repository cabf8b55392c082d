"""A run as a job of Kubernetes: the manifests of its pods, for `kubectl apply`.

Each kind runs the whole flow, `onward run CONFIG --name NAME --continue`, as the first process of a pod. Kubernetes
starts the pod again elsewhere when its node is lost or drained, and the run goes on from its newest checkpoint.

    job        a pod: the flow, and a rank for each of its GPUs; a Job of Kubernetes itself
    trainjob   the same pod, for Kubeflow Trainer v2; its TrainingRuntime is part of the manifests
    mpijob     a pod for the flow, and --nodes pods for ranks, which mpirun reaches over ssh; for the MPI operator

All pods share a volume, which is Onward's home. A run of several pods by torchrun would need its directory and shards
before the first rank, and somebody who exports afterwards: both is the flow's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml

from onward.tasks.checks.machine_check import num_ranks
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.sections.ranks import LaunchConfig, ParallelConfig
from onward.trainer.config.setting_paths import BUNDLED_SOURCES, PATHS, values_at
from onward.trainer.config.urls import url_of
from onward.trainer.errors import ConfigError, shown
from onward.trainer.run.directory import onward_home

Kind = Literal["job", "trainjob", "mpijob"]
Manifest: TypeAlias = dict[str, Any]
"""A manifest, or a part of one."""

HOME = "/onward"
"""Where pods mount the volume that they share: ONWARD_HOME, and all files that settings name."""
FILES = "/config"
"""Where pods find the TOML files of the run."""
HOSTFILE = "/etc/mpi/hostfile"
"""Written by the MPI operator. Onward passes it on, since Open MPI 5 does not know the variables that name it."""
SSH_FOLDER = "/home/onward/.ssh"
SSH_PORT = 2222
"""A user other than root cannot listen below 1024. The Dockerfile has the same number, for the client."""
USER = 1000
"""The id of the user `onward` of the Dockerfile."""
STARTS = 20
"""How often a pod is started again. An evicted one and one of a lost node do not count."""
NOT_AGAIN = (2, 5, 6, 7, 8, 72, 75, 78)
"""Exit statuses after which another start would end alike, and that of `onward stop`, which somebody has asked for."""
AFTER_GRACE_S = 60
"""Time for the flow to end after its ranks have saved: it reports, and its servers stop."""
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""Kubernetes makes names of pods and hosts of it, of up to 63 characters."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Writes texts of several lines as they are."""

    def represent_text(self, text: str) -> Any:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: kubectl reads `*id001` as well, and people do not."""
        return True


_Dumper.add_representer(str, _Dumper.represent_text)


@dataclass(frozen=True)
class Pods:
    """What is decided of the pods of a run outside of its configuration."""

    kind: Kind
    image: str
    claim: str
    """The PersistentVolumeClaim of the volume that they share."""
    nodes: int = 1
    """Pods with ranks."""


def manifests_of(name: str, config: RunConfig, files: Sequence[str], words: Sequence[str], pods: Pods) -> str:
    """Return the manifests of the run NAME as YAML. Raises ConfigError with all problems.

    config: what `files` and `words` mean on this machine. files: TOML files, which become part of the manifests, and
    names of examples. words: what follows them on the command line.
    """
    problems = [*_pod_problems(pods, config.parallel, config.launch), *_path_problems(config, files)]
    if not NAME.fullmatch(name):
        problems.append(
            f"--name {shown(repr(name))}: Kubernetes takes up to 40 small letters, digits and hyphens, of which the "
            "first is a letter"
        )
    if problems:
        raise ConfigError(problems)
    texts = {Path(file).name: Path(file).read_text(encoding="utf-8") for file in files if Path(file).is_file()}
    # what is no file here is the name of an example, which the image has as well
    layers = [f"{FILES}/{Path(file).name}" if Path(file).name in texts else file for file in files]
    command = ["onward", "run", *layers, *words, "--name", name, "--continue"]
    # all pods with ranks are alike, so each has room for as many as the fullest one
    ranks = math.ceil(num_ranks(config.parallel, config.launch) / pods.nodes)
    documents = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-files"}, "data": texts}]
    job = _job(_pod(name, config.launch, pods, _flow(command, _resources(config.launch, ranks))))
    if pods.kind == "job":
        documents.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job})
    elif pods.kind == "trainjob":
        documents += _train_job(name, job)
    else:
        documents.append(_mpi_job(name, config.launch, pods, command, ranks))
    return str(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000))


def _pod_problems(pods: Pods, parallel: ParallelConfig, launch: LaunchConfig) -> Iterator[str]:
    """Yield why ranks and pods do not fit together."""
    ranks = num_ranks(parallel, launch)
    if parallel.sizes == "auto" and not launch.num_ranks:
        yield 'parallel = "auto" needs launch.num_ranks here: the pods are made before the flow can count GPUs'
    if pods.nodes > 1 and pods.kind != "mpijob":
        yield f"--nodes {pods.nodes} needs --kind mpijob: a {pods.kind} is one pod, with a rank for each of its GPUs"
    if pods.nodes > ranks:
        yield f"--nodes {pods.nodes}: the run has {ranks} rank{'s' * (ranks > 1)}, and each pod needs one"
    if launch.hostfile or launch.launcher not in ("auto", "mpirun"):
        yield "launch.hostfile and launch.launcher are chosen by --kind; leave them out"


def _path_problems(settings: Any, files: Sequence[str]) -> Iterator[str]:
    """Yield the settings that name what pods do not have."""
    names = [Path(file).name for file in files if Path(file).is_file()]
    if len(set(names)) < len(names):
        yield f"the TOML files {', '.join(names)} have equal names, and pods find them in one folder; rename one"
    made_there = onward_home() / "models" if len(names) < len(files) else None
    for key in PATHS:
        missing = [path for path in values_at(settings, key.split(".")) if not _is_in_pods(path, made_there)]
        for path in missing:
            yield (
                f"{key} is {path}, which pods do not have; put it on the volume of --claim, which they mount at "
                f"{HOME}, and write {HOME}/..., or give a URL such as s3://"
            )


def _is_in_pods(path: Any, made_there: Path | None) -> bool:
    """Return whether pods find a path. made_there: where models of examples are, which a pod makes for itself."""
    if not str(path) or str(path) in BUNDLED_SOURCES or url_of(str(path)):
        return True
    folders = {Path(HOME)} | ({made_there} if made_there else set())
    return not folders.isdisjoint(Path(path).parents)


# -- the pods


def _pod(name: str, launch: LaunchConfig, pods: Pods, container: Manifest) -> Manifest:
    """Return the template of a pod, which Pod Security's level `restricted` admits."""
    inside = {
        "name": "node",  # as Kubeflow Trainer calls the container with the training
        "image": pods.image,
        # SIGTERM reaches the flow itself: no shell is between
        **container,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "home", "mountPath": HOME},
            {"name": "files", "mountPath": FILES, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    spec = {
        # a controller may start another pod on any node; the kubelet would use the same node again
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(launch.stop_grace_s) + AFTER_GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            # the group of the volume, so that a user other than root can write to it
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [inside],
        "volumes": [
            {"name": "home", "persistentVolumeClaim": {"claimName": pods.claim}},
            {"name": "files", "configMap": {"name": f"{name}-files"}},
            # ranks of a pod send tensors through it, and containers have 64 MiB
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    return {"metadata": {"labels": {"app.kubernetes.io/name": "onward", "onward/run": name}}, "spec": spec}


def _flow(command: Sequence[str], resources: Manifest) -> Manifest:
    """Return what a container needs to run the flow."""
    return {
        "command": [*command],
        "env": [{"name": "ONWARD_HOME", "value": HOME}],
        # PREFECT_API_URL, MLFLOW_TRACKING_URI and keys of stores
        "envFrom": [{"secretRef": {"name": "onward", "optional": True}}],
        "resources": resources,
    }


def _resources(launch: LaunchConfig, ranks: int) -> Manifest:
    """Return what a pod with so many ranks asks for."""
    asked = {"requests": {"cpu": str(ranks * (launch.threads_per_rank or 1))}}
    if launch.device == "cuda":
        # Kubernetes takes a limit of GPUs for the request as well
        asked["limits"] = {"nvidia.com/gpu": str(math.ceil(ranks / launch.ranks_per_gpu))}
    return asked


# -- the kinds


def _job(pod: Manifest) -> Manifest:
    """Return the specification of a Job of one pod."""
    rules = [
        # the first rule that fits counts, and an evicted pod may end with a status of the second one
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": [*NOT_AGAIN]}},
    ]
    return {"backoffLimit": STARTS, "podFailurePolicy": {"rules": rules}, "template": pod}


def _train_job(name: str, job: Manifest) -> list[Manifest]:
    """Return a TrainingRuntime with the pod, and the TrainJob that refers to it."""
    group = "trainer.kubeflow.org"
    # Kubeflow finds the pods of the training by this label
    labels = {f"{group}/trainjob-ancestor-step": "trainer"}
    job_set = {"replicatedJobs": [{"name": "node", "template": {"metadata": {"labels": labels}, "spec": job}}]}
    runtime = {
        "apiVersion": f"{group}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": name},
        "spec": {"mlPolicy": {"numNodes": 1}, "template": {"spec": job_set}},
    }
    reference = {"apiGroup": group, "kind": "TrainingRuntime", "name": name}
    train_job = {
        "apiVersion": f"{group}/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {"runtimeRef": reference},
    }
    return [runtime, train_job]


def _mpi_job(name: str, launch: LaunchConfig, pods: Pods, command: Sequence[str], ranks: int) -> Manifest:
    """Return an MPIJob: the flow in its launcher, `ranks` ranks in each worker."""
    # before --name: an override is one of the words
    flow = [*command[:-3], f"launch.hostfile={HOSTFILE}", *command[-3:]]
    # the ranks are in the workers, and the flow itself needs little
    launcher = _pod(name, launch, pods, _flow(flow, {"requests": {"cpu": "1"}}))
    sshd = {
        "command": ["/usr/sbin/sshd", "-D", "-e", "-f", "/etc/ssh/sshd_config.onward"],
        "ports": [{"containerPort": SSH_PORT}],
        "readinessProbe": {"tcpSocket": {"port": SSH_PORT}},
        "resources": _resources(launch, ranks),
    }
    worker = _pod(name, launch, pods, sshd)
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": name},
        "spec": {
            "slotsPerWorker": ranks,
            "mpiImplementation": "OpenMPI",
            # mpirun fails at a worker whose sshd has not started
            "launcherCreationPolicy": "WaitForWorkersReady",
            "sshAuthMountPath": SSH_FOLDER,
            # sshd never ends by itself: workers would keep their GPUs after the run
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": STARTS},
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": launcher},
                "Worker": {"replicas": pods.nodes, "restartPolicy": "Never", "template": worker},
            },
        },
    }
