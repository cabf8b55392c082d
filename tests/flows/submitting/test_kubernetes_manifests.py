"""The manifests of a run obey the schemas of Kubernetes and Kubeflow. No cluster can run here."""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from onward.flows.submitting.kubernetes_manifests import Kind, Pods, manifests_of
from onward.trainer.config.loading import load_config
from onward.trainer.errors import ConfigError
from tests.support.ranks import ROOT
from tests.support.workshop import until

DOCKERFILE = ROOT / "Dockerfile"
HAS_SCHEMAS = bool(importlib.util.find_spec("kubernetes_validate") and importlib.util.find_spec("kubeflow_trainer_api"))
TOML = """[model]
path = "/onward/model.onnx"
[data]
source = "s3://bucket/data.parquet"
[train]
num_steps = 4
[parallel]
data = 4
[launch]
device = "cuda"
stop_grace_s = 90.5
"""
MPI_JOB = {
    "apiVersion": {"const": "kubeflow.org/v2beta1"},
    "kind": {"const": "MPIJob"},
    "metadata": {"type": "object"},
    "spec": {
        "slotsPerWorker": {"type": "integer", "minimum": 1},
        "mpiImplementation": {"enum": ["OpenMPI", "Intel", "MPICH"]},
        "launcherCreationPolicy": {"enum": ["AtStartup", "WaitForWorkersReady"]},
        "sshAuthMountPath": {"type": "string"},
        "runPolicy": {
            "cleanPodPolicy": {"enum": ["None", "Running", "All"]},
            "backoffLimit": {"type": "integer"},
        },
        "mpiReplicaSpecs": {
            role: {
                "replicas": {"type": "integer"},
                "restartPolicy": {"enum": ["Never", "OnFailure"]},
                "template": {"type": "object"},
            }
            for role in ("Launcher", "Worker")
        },
    },
}
"""The fields of the MPI operator's v2beta1 that are used; PyPI has no schema of them. An unknown field is refused."""


def strict(fields: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema of an object of those fields and no others."""
    if any(isinstance(value, str | list | int) for value in fields.values()):
        return fields
    properties = {name: strict(inner) for name, inner in fields.items()}
    return {"type": "object", "properties": properties, "required": [*fields], "additionalProperties": False}


def configuration(folder: Path, text: str) -> Path:
    (folder / "run.toml").write_text(text)
    return folder / "run.toml"


def written(folder: Path, kind: Kind, *words: str, nodes: int = 1) -> list[dict[str, Any]]:
    config = load_config(configuration(folder, TOML), list(words))
    pods = Pods(kind, "registry/onward:1", "shared", nodes)
    return list(yaml.safe_load_all(manifests_of("r1", config, [str(folder / "run.toml")], words, pods)))


def validated(document: dict[str, Any]) -> None:
    """Raise for a type, a missing field or an unknown one."""
    import kubernetes_validate

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kubernetes_validate.validate(document, "1.33", strict=True)


def validated_by_kubeflow(document: dict[str, Any]) -> None:
    from kubeflow_trainer_api import models

    model = {"TrainJob": models.TrainerV1alpha1TrainJob, "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime}
    # fields that it does not know are not refused, but left out
    assert model[document["kind"]].from_dict(document).to_dict() == document


def validated_mpi_job(document: dict[str, Any]) -> None:
    jsonschema.validate(document, strict(MPI_JOB))
    for replicas in document["spec"]["mpiReplicaSpecs"].values():
        validated({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": replicas["template"]["spec"]})


def with_typo(document: dict[str, Any], before: str) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(document).replace(f'"{before}"', f'"{before}x"'))
    assert changed != document
    return changed


@pytest.mark.skipif(not HAS_SCHEMAS, reason="kubernetes-validate and kubeflow_trainer_api are not installed")
def test_each_kind_obeys_its_schema_and_a_misspelt_field_does_not(tmp_path: Path) -> None:
    files, job = written(tmp_path, "job")
    validated(files)
    validated(job)
    assert files["data"] == {"run.toml": TOML}
    for field in ("terminationGracePeriodSeconds", "podFailurePolicy", "seccompProfile"):
        with pytest.raises(Exception, match=field):
            validated(with_typo(job, field))

    _, runtime, train_job = written(tmp_path, "trainjob")
    validated_by_kubeflow(runtime)
    validated_by_kubeflow(train_job)
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    validated({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": node["template"]["spec"]})
    misspelt = ((runtime, "terminationGracePeriodSeconds"), (runtime, "numNodes"), (train_job, "runtimeRef"))
    for document, field in misspelt:
        with pytest.raises((AssertionError, ValueError)):
            validated_by_kubeflow(with_typo(document, field))

    _, mpi_job = written(tmp_path, "mpijob", nodes=2)
    validated_mpi_job(mpi_job)
    for field in ("slotsPerWorker", "cleanPodPolicy", "readinessProbe"):
        with pytest.raises(Exception, match=field):
            validated_mpi_job(with_typo(mpi_job, field))


def test_a_pod_is_not_root_gets_signals_itself_and_has_longer_to_end_than_its_ranks(tmp_path: Path) -> None:
    _, job = written(tmp_path, "job", "train.seed=3", "launch.ranks_per_gpu=2")
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["command"] == [
        *("onward", "run", "/config/run.toml", "train.seed=3", "launch.ranks_per_gpu=2", "--name", "r1", "--continue"),
    ]
    assert spec["terminationGracePeriodSeconds"] > 90.5
    assert spec["securityContext"]["runAsNonRoot"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert {volume["name"]: [*volume][1] for volume in spec["volumes"]} == {
        "home": "persistentVolumeClaim",
        "files": "configMap",
        "shared-memory": "emptyDir",
    }
    assert container["env"] == [{"name": "ONWARD_HOME", "value": "/onward"}]


def test_an_mpi_job_gives_each_pod_its_ranks_and_the_flow_the_hostfile(tmp_path: Path) -> None:
    _, job = written(tmp_path, "mpijob", "train.seed=3", nodes=2)
    roles = job["spec"]["mpiReplicaSpecs"]
    launcher, worker = (roles[role]["template"]["spec"]["containers"][0] for role in ("Launcher", "Worker"))
    hostfile = "launch.hostfile=/etc/mpi/hostfile"
    assert launcher["command"][3:] == ["train.seed=3", hostfile, "--name", "r1", "--continue"]
    assert "limits" not in launcher["resources"]
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert (roles["Worker"]["replicas"], job["spec"]["slotsPerWorker"]) == (2, 2)


@pytest.mark.parametrize(
    ("kind", "nodes", "words", "said"),
    [
        ("job", 1, ["model.path=model.onnx"], "model.path is .*/model.onnx, which pods do not have; put it"),
        ("job", 1, ["data.source=/onwards/x.csv"], "data.source is /onwards/x.csv, which pods do not have"),
        ("trainjob", 2, [], "--nodes 2 needs --kind mpijob"),
        ("mpijob", 5, [], "--nodes 5: the run has 4 ranks"),
        ("job", 1, ["launch.launcher=ray"], "launch.hostfile and launch.launcher are chosen by --kind"),
    ],
)
def test_what_pods_could_not_run_is_refused(
    tmp_path: Path, kind: Kind, nodes: int, words: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        written(tmp_path, kind, *words, nodes=nodes)


def test_all_problems_are_said_at_once(tmp_path: Path) -> None:
    config = load_config(configuration(tmp_path, TOML.replace("/onward/", "/")))
    with pytest.raises(ConfigError) as refused:
        manifests_of("R_1", config, [], [], Pods("job", "onward", "onward", 3))
    for said in ("takes up to 40 small letters", "model.path is /model.onnx", "--nodes 3 needs --kind mpijob"):
        assert said in str(refused.value)


def test_the_command_prints_manifests_of_the_configuration_as_it_is_written(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "onward.flows.cli", "submit", str(configuration(tmp_path, TOML))]
    words += ["train.seed=3", "--on", "kubernetes", "--name", "r1", "--kind", "trainjob"]
    printed = subprocess.run(words, capture_output=True, text=True, check=True)
    files, *others = yaml.safe_load_all(printed.stdout)
    assert files["data"] == {"run.toml": TOML}
    assert [document["kind"] for document in others] == ["TrainingRuntime", "TrainJob"]


def test_sshd_of_the_image_serves_a_user_without_any_capability(tmp_path: Path) -> None:
    """As in the pods of an MPIJob: the keys are of root, and readable."""
    if os.geteuid() or not shutil.which("setpriv") or not Path("/usr/sbin/sshd").exists():
        pytest.skip("needs root, setpriv and sshd")
    account = next((each for each in pwd.getpwall() if each.pw_uid >= 1000 and each.pw_shell.endswith("sh")), None)
    if account is None:
        pytest.skip("there is no account of a person")
    (lines,) = re.findall(r"printf '%s\\n' ((?:'[^']*'[\s\\]+)+)> /etc/ssh/sshd_config.onward", DOCKERFILE.read_text())
    with tempfile.TemporaryDirectory() as made, socket.create_server(("127.0.0.1", 0)) as taken:
        folder, port = Path(made), str(taken.getsockname()[1])
        taken.close()
        subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", str(folder / "id_rsa")], check=True)
        shutil.copy(folder / "id_rsa.pub", folder / "authorized_keys")
        settings = "\n".join(shlex.split(lines.replace("\\\n", " "))).replace("/home/onward/.ssh", made)
        (folder / "sshd_config").write_text(settings.replace("Port 2222", f"Port {port}\nListenAddress 127.0.0.1"))
        for path in (folder, *folder.iterdir()):
            path.chmod(0o755 if path == folder else 0o644)
        user = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
        user += ["--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
        server = subprocess.Popen([*user, "/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config")])
        try:
            options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "BatchMode=yes"]
            words = ["ssh", "-F", "/dev/null", "-i", str(folder / "id_rsa"), "-p", port, *options]
            words += [f"{account.pw_name}@127.0.0.1", "id -u"]
            until(lambda: subprocess.run([*user, *words], stdout=subprocess.DEVNULL).returncode == 0, limit_s=30)
            said = subprocess.run([*user, *words], capture_output=True, text=True, check=True)
            assert said.stdout == f"{account.pw_uid}\n"
        finally:
            server.kill()
            server.wait(20)


@pytest.mark.skipif(not shutil.which("ssh"), reason="needs ssh")
@pytest.mark.parametrize(
    ("host", "port"), [("r1-worker-0.r1.team.svc", "2222"), ("r1-worker-11", "2222"), ("github.com", "22")]
)
def test_ssh_of_the_image_takes_the_port_of_the_pods_for_pods_alone(tmp_path: Path, host: str, port: str) -> None:
    (lines,) = re.findall(r"printf '%s\\n' ((?:'[^']*'[\s\\]+)+)> /etc/ssh/ssh_config.d", DOCKERFILE.read_text())
    (tmp_path / "config").write_text("\n".join(shlex.split(lines.replace("\\\n", " "))) + "\n")
    words = ["ssh", "-F", str(tmp_path / "config"), "-G", host]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert f"port {port}" in said
    assert ("stricthostkeychecking false" in said) == (port == "2222")
