"""The pod that `onward submit --on kubernetes` prints, without Kubernetes: process 1, not root, ended by SIGTERM."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from onward.flows.submitting.kubernetes_manifests import Pods, manifests_of
from onward.trainer.config.loading import load_config
from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.attempt_endings import endings
from tests.support.pods import first_process, missing, start_pod
from tests.support.runs import events
from tests.support.workshop import CONFIG, Workshop, reached, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.mpi,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


def test_a_pod_that_is_ended_saves_and_the_next_one_finishes_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    volume = Workshop.made(tmp_path / "volume").root
    text = CONFIG.replace('"model.onnx"', '"/onward/model.onnx"').replace('"data.npz"', '"/onward/data.npz"')
    (tmp_path / "run.toml").write_text(text)
    words = ["launch.rehearsal='off'", "monitor.report_to=[]", "train.log_period=5", "train.evaluation_period=0"]
    config = load_config(tmp_path / "run.toml", words)
    printed = manifests_of("r1", config, [str(tmp_path / "run.toml")], words, Pods("job", "onward", "onward"))
    files, job = yaml.safe_load_all(printed)
    spec = job["spec"]["template"]["spec"]

    def started() -> subprocess.Popen[bytes]:
        return start_pod(spec, files["data"], volume, tmp_path / "pod")

    def said() -> str:
        return (tmp_path / "pod" / "pod.log").read_text()[-3000:]

    pod = started()
    begun = until(lambda: pod.poll() is not None or [*volume.glob("runs/*/identity.json")], limit_s=300)
    assert pod.poll() is None, said()
    run = RunDir(begun[0].parent)
    until(lambda: pod.poll() is not None or reached(run, 100), limit_s=300)
    first_process(pod).send_signal(signal.SIGTERM)
    assert pod.wait(spec["terminationGracePeriodSeconds"]) == 128 + signal.SIGTERM, said()
    saved = events(run, "checkpoint")[-1].step
    assert endings(run)[-1].kind == "stopped", said()

    assert started().wait(600) == 0, said()
    assert len([*volume.glob("runs/*/identity.json")]) == 1
    assert [event.step for event in events(run, "start")] == [0, saved]
    assert endings(run)[-1].kind == "done"
    # Kubernetes may start it once more
    assert started().wait(300) == 0, said()
    assert len(events(run, "start")) == 2
