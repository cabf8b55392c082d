"""What this machine lacks is known from its files and the configuration alone, in moments and without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

from onward.infra.job.launcher import LaunchError
from onward.infra.job.mpirun import ALLOCATIONS, Mpirun
from onward.tasks.checks import disk_space, machine_check
from onward.tasks.checks.machine_check import crowded_cores, machine_problems
from onward.trainer.config.loading import build_config
from onward.trainer.config.sections.ranks import LaunchConfig
from onward.trainer.run.machine import this_machine
from onward.trainer.run.machine.this_machine import most_gpus
from onward.trainer.run.outcomes import storage
from tests.support.graphs import tiny_mlp

CUDA_BUILD = "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "home"))
    for name in (*ALLOCATIONS, "MLFLOW_TRACKING_URI", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def problems(tmp_path: Path, *, resumed: bool = False, **sections: Any) -> list[str]:
    onnx.save(tiny_mlp(), tmp_path / "m.onnx")
    given = {"model": {"path": tmp_path / "m.onnx"}, "data": {"source": "digits"}, "train": {"num_steps": 1}}
    return machine_problems(dict(build_config({**given, **sections})), resumed=resumed)


@pytest.mark.slow
def test_weights_and_biases_needs_its_package_and_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(mode: str = "online", *, key: str = "") -> list[str]:
        """What a new process says, because wandb reads its environment and its login once."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        environment |= {"WANDB_MODE": mode, "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
        environment |= {"WANDB_CONFIG_DIR": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9"}
        environment |= {"WANDB_API_KEY": key} if key else {}
        code = (
            "from onward.tasks.checks.machine_check import reporting_problems\n"
            "import json; print(json.dumps(list(reporting_problems(['wandb']))))"
        )
        ended = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, ended.stderr
        assert "wandb:" not in ended.stderr, "nothing of wandb is in the terminal"
        found: list[str] = json.loads(ended.stdout)
        return found

    assert said("offline") == said("disabled") == said(key="0" * 40) == []
    assert said() == [
        "monitor.report_to: Weights & Biases has no login for http://127.0.0.1:9 on this machine: run `wandb login`, "
        "or set WANDB_API_KEY; with WANDB_MODE=offline the run writes files, which `wandb sync` sends later"
    ]
    assert "WANDB_API_KEY invalid" in said(key="too-short")[0]

    assert problems(tmp_path, monitor={"report_to": []}) == []
    monkeypatch.setattr("onward.infra.weights_and_biases.is_installed", lambda: False)
    (problem,) = problems(tmp_path, monitor={"report_to": ["tensorboard", "wandb"]})
    assert problem.startswith('monitor.report_to has "wandb", whose package is not installed here: pip install ')
    assert "[wandb]" in problem
    assert problems(tmp_path, monitor={"report_to": ["wandb"]}, resumed=True) == []


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many GPUs the machine has."""

    def have(number: int | None) -> None:
        monkeypatch.setattr(machine_check, "most_gpus", lambda: (number, f"there are {number or 'no'} /dev/nvidia*"))

    return have


def test_an_ordinary_run_lacks_nothing(tmp_path: Path) -> None:
    assert problems(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "parallel", "launch", "sentence"),
    [
        (0, {}, {}, "1 rank needs a GPU, but this machine has none (there are no /dev/nvidia*); set launch.device"),
        (
            2,
            {"data": 4},
            {},
            "4 ranks need a GPU, but this machine has 2 (there are 2 /dev/nvidia*)",
        ),
        (2, {"data": 6}, {"ranks_per_gpu": 2}, "6 ranks need a GPU, but this machine has 2"),
        (1, {"sizes": "auto"}, {"num_ranks": 2}, "2 ranks need a GPU, but this machine has 1"),
        (2, {"data": 4}, {"ranks_per_gpu": 2}, ""),
        (None, {"data": 4}, {}, ""),
    ],
)
def test_ranks_without_a_gpu_are_counted(
    tmp_path: Path, gpus: Any, number: int | None, parallel: Any, launch: Any, sentence: str
) -> None:
    gpus(number)
    found = problems(tmp_path, parallel=parallel, launch={"device": "cuda", **launch}, train=BATCH)
    assert [sentence in problem for problem in found] == ([True] if sentence else [])


BATCH = {"num_steps": 1, "global_batch_size": 24}


def test_hosts_elsewhere_may_have_the_gpus(tmp_path: Path, gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(0)
    (tmp_path / "hosts").write_text("node1\nnode2\n")
    assert problems(tmp_path, launch={"device": "cuda", "hostfile": str(tmp_path / "hosts")}) == []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert problems(tmp_path, launch={"device": "cuda"}) == []


@pytest.mark.parametrize(
    ("version", "visible", "files", "number"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", None, ["nvidia0"], 0),
        (CUDA_BUILD, None, ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], 2),
        (CUDA_BUILD, None, [], 0),
        (CUDA_BUILD, "", ["nvidia0"], 0),
        (CUDA_BUILD, "1,0,-1,2", ["nvidia0"], 2),
        (CUDA_BUILD, None, ["dxg"], None),
        ("", None, ["nvidia0"], 1),
    ],
)
def test_gpus_are_counted_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, visible: str | None, files: list[str], number: Any
) -> None:
    monkeypatch.setattr(this_machine, "_torch_version", lambda: version)
    for name in files:
        (tmp_path / name).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert most_gpus(environment, tmp_path)[0] == number


def test_the_installed_torch_says_what_it_was_built_for() -> None:
    import torch

    text = this_machine._torch_version()
    assert f"__version__ = '{torch.__version__}'" in text
    if torch.version.cuda is None and torch.version.hip is None:
        assert most_gpus() == (0, f"the installed torch {torch.__version__} is built for CPUs only")


def test_a_missing_mpirun_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(launcher: Mpirun) -> Path:
        raise LaunchError("no MPI")

    monkeypatch.setattr(Mpirun, "program", absent)
    (problem,) = problems(tmp_path)
    assert problem.startswith("no MPI: pip install -e '")
    assert problem.endswith("[mpi]'")


def test_a_missing_compiler_is_known_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_check, "missing_compiler", lambda: "there is no compiler")
    assert problems(tmp_path, graph={"compile": True}) == ["there is no compiler"]
    assert problems(tmp_path) == []


def test_a_host_file_is_read(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    for text, sentence in (
        ("# nothing\n", "names no host"),
        ("a slots=1\nb slots=1\n", "has 2 slots on 2 hosts, but the job needs 3 ranks"),
        ("a slots=1\nb\n", "has 2 slots on 2 hosts, but the job needs 3 ranks"),
    ):
        hosts.write_text(text)
        (problem,) = problems(tmp_path, launch={"hostfile": str(hosts)}, parallel={"data": 3}, train=BATCH)
        assert sentence in problem
    hosts.write_text("a slots=2\nb\n")
    assert problems(tmp_path, launch={"hostfile": str(hosts)}, parallel={"data": 3}, train=BATCH) == []


def test_a_run_that_began_goes_on_without_its_mlflow_server(tmp_path: Path) -> None:
    monitor = {"tracking_uri": "http://127.0.0.1:1"}
    (problem,) = problems(tmp_path, monitor=monitor)
    assert "the MLflow server http://127.0.0.1:1 does not answer" in problem
    assert problems(tmp_path, monitor=monitor, resumed=True) == []


def test_weights_that_fit_neither_memory_nor_disk_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_check, "free_host_memory", lambda: 100)
    small = type("place", (), {"f_bavail": 1, "f_frsize": 512, "f_files": 0, "f_favail": 0, "f_flag": 0})
    monkeypatch.setattr(disk_space.os, "statvfs", lambda path: small)
    monkeypatch.setattr(storage, "FULL_BYTES", 512)  # not full, but too small
    disk, memory = problems(tmp_path, launch={"device": "cpu"}, parallel={"data": 2})
    assert "of disk are free on the file system" in disk
    assert "the weights of 2 ranks need" in memory


def test_more_ranks_than_cores_are_named_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_check, "usable_cores", lambda: 2)

    def said(ranks: int, device: str = "cpu") -> str:
        return crowded_cores(LaunchConfig.model_validate({"device": device, "launcher": "mpirun"}), ranks)

    assert said(4).startswith("4 ranks share the 2 cores of this machine: a step takes longer than with 2 ranks")
    assert said(2) == ""
    assert said(4, "cuda") == ""
