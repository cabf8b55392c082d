"""Which launcher starts the ranks, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.tasks.launching.jobs import chosen_launcher, launcher_of
from onward.trainer.config.loading import build_config
from onward.trainer.config.sections.ranks import LaunchConfig
from onward.trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("launch", "job", "has_srun", "name", "why"),
    [
        ({}, "", True, "mpirun", ""),
        ({}, "7", True, "srun", "this is job 7 of Slurm"),
        ({}, "7", False, "mpirun", "job 7 of Slurm has no srun on this host"),
        ({"hostfile": "/hosts"}, "7", True, "mpirun", "launch.hostfile names hosts"),
        ({"launcher": "mpirun"}, "7", True, "mpirun", "launch.launcher is 'mpirun'"),
        ({"launcher": "slurm"}, "", True, "srun", "launch.launcher is 'slurm'"),
    ],
)
def test_slurm_is_chosen_inside_of_its_allocations(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launch: dict[str, str],
    job: str,
    has_srun: bool,
    name: str,
    why: str,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if has_srun:
        (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    config = LaunchConfig.model_validate(launch)
    assert launcher_of(config).name == name
    assert chosen_launcher(config)[1].startswith(why)
    assert bool(why) == bool(chosen_launcher(config)[1])


def test_a_hostfile_beside_a_launcher_with_hosts_of_its_own_is_refused() -> None:
    sections = {"model": {"path": "/m.onnx"}, "data": {"source": "digits"}, "train": {"num_steps": 4}}
    with pytest.raises(ConfigError, match=r"launch\.hostfile is for mpirun, and launch\.launcher 'slurm' has hosts"):
        build_config({**sections, "launch": {"launcher": "slurm", "hostfile": "/hosts"}})
