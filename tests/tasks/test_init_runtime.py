"""init runtime: the real preflight under the real mpirun, and the problems that it reports."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

from onward.infra.job.job import Job, Outcome
from onward.infra.job.mpirun import Mpirun
from onward.tasks.init_runtime import devices, init_runtime, memory_warnings, needs_of, problems
from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import RuntimeUnavailable
from onward.trainer.run.directory import RunDir
from onward.trainer.run.outcomes.ending_kinds import memory_advice
from onward.trainer.run.records import Needs, RankError, RankReport, RuntimeReport, read_record, write_record
from tests.support.graphs import tiny_transformer

MODEL_BYTES = 1_000_000
PLENTY = 10**12


def config(model: Path, **launch: Any) -> RunConfig:
    return build_config(
        {
            "model": {"path": str(model)},
            "data": {"source": "digits"},
            "train": {"num_steps": 8, "global_batch_size": 4},
            "parallel": {"data": 2},
            "launch": {"device": "cpu", "start_timeout_s": 60, **launch},
        }
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A configured run of two ranks; of the model only the size is read."""
    model = tmp_path / "model.onnx"
    model.write_bytes(bytes(MODEL_BYTES))
    run = RunDir(tmp_path)
    write_record(run.config, config(model))
    return run


# -- real launches


@pytest.mark.mpi
def test_every_rank_writes_a_report(run: RunDir) -> None:
    report = init_runtime.fn(run)
    assert [(rank.rank, rank.world_size, rank.device, rank.all_reduce) for rank in report.ranks] == [
        (0, 2, "cpu", 3.0),
        (1, 2, "cpu", 3.0),
    ]
    assert report.ranks[0].pid != report.ranks[1].pid
    assert {"torch", "mpi4py", "MPI", "Python"} <= set(report.ranks[0].versions)
    assert report.disk_free_bytes > MODEL_BYTES
    assert read_record(run.runtime, RuntimeReport) == report


@pytest.mark.mpi
@pytest.mark.usefixtures("forked")
def test_a_rank_without_a_gpu_is_refused_by_name(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write_record(run.config, config(run.root / "model.onnx", device="cuda"))
    with pytest.raises(RuntimeUnavailable) as refused:
        init_runtime.fn(run)
    assert "no GPU for rank 0: it is local rank 0 of 2 on its host, which has 0 GPUs" in str(refused.value)
    assert "no GPU for rank 1: it is local rank 1 of 2 on its host, which has 0 GPUs" in str(refused.value)
    assert not run.runtime.exists()


def test_each_line_of_a_refusal_names_the_rank_that_it_is_about(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank reports for all; its own number does not stand in front of what is said of another."""
    cause = "RuntimeUnavailable: no GPU for rank 0: it has none\nno GPU for rank 1: it has none\nthe clock is wrong"

    def refused(job: Job) -> Outcome:
        error = RankError(attempt=0, rank=1, host="h1", step=0, cause=cause, traceback="", at_ms=1)
        write_record(run.rank_error(0, 1), error)
        return Outcome(1, "exited", 0.0, 1)

    monkeypatch.setattr(Job, "run", refused)
    write_record(run.config, config(run.root / "model.onnx"))
    with pytest.raises(RuntimeUnavailable) as found:
        init_runtime.fn(run)
    assert found.value.problems == (
        "no GPU for rank 0: it has none",
        "no GPU for rank 1: it has none",
        "rank 1 on h1: the clock is wrong",
    )


@pytest.mark.mpi
def test_a_launcher_that_starts_another_number_of_ranks_is_refused(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A script in place of mpirun, which starts one rank in any case."""
    real = Mpirun().program()
    _put_mpirun(tmp_path, monkeypatch, f'#!/bin/sh\nshift 2\nexec {real} -n 1 "$@"\n')
    with pytest.raises(
        RuntimeUnavailable, match="the job needs 2 ranks, but MPI sees a world of 1 in the process launched as rank 0"
    ):
        init_runtime.fn(run)


@pytest.mark.mpi
def test_the_output_of_a_failing_launcher_is_in_the_error(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _put_mpirun(tmp_path, monkeypatch, "#!/bin/sh\necho no route to host h1\nexit 213\n")
    message = r"2 ranks did not start: .* status 213; the end of .*\n  \| no route to host h1"
    with pytest.raises(RuntimeUnavailable, match=message):
        init_runtime.fn(run)


def test_a_machine_without_mpirun_is_refused(run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeUnavailable, match=r"no MPI: there is no mpirun, .*; install Open MPI"):
        init_runtime.fn(run)


def _put_mpirun(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "bin" / "mpirun"
    program.parent.mkdir()
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(folder))


# -- judging the reports


def reported(*changes: dict[str, Any]) -> RuntimeReport:
    """Return the report of two ranks without problems on one host, with the changes to each."""
    good: dict[str, Any] = {
        "world_size": 2,
        "expected_world_size": 2,
        "host": "h0",
        "pid": 1,
        "device": "cpu",
        "versions": {},
        "memory_bytes": PLENTY,
        "all_reduce": 3.0,
        "all_reduce_expected": 3.0,
    }
    ranks = tuple(RankReport(**{**good, "rank": rank, **change}) for rank, change in enumerate(changes))
    return RuntimeReport(ranks=ranks, launch_s=1.0, disk_free_bytes=PLENTY)


NEEDS = Needs(rank_bytes=6_000_000, activation_bytes=5_000_000, checkpoint_bytes=3_000_000, model_bytes=1_000_000)


@pytest.mark.parametrize(
    ("report", "sentences"),
    [
        (reported({}, {}), []),
        (reported({}), ["the job needs 2 ranks; no report came from rank 1"]),
        (
            reported(
                {"versions": {"torch": "2.13.0", "Python": "3.11.7"}},
                {"versions": {"torch": "2.12.1", "Python": "3.11.9"}, "host": "h1"},
            ),
            [
                "the hosts have different versions of torch: 2.13.0 on h0; 2.12.1 on h1. Install the same one on all "
                "hosts"
            ],
        ),
        (
            reported({}, {"world_size": 1, "all_reduce": 1.0}),
            [
                "rank 1 on h0 has world size 1, but the job needs 2 ranks",
                "rank 1 on h0: all-reduce returned 1, expected 3",
            ],
        ),
        (
            reported({"memory_bytes": 11_000_000}, {"memory_bytes": 11_000_000}),
            [
                "11 MB of memory are free on h0 (cpu), but the weights, gradients and optimizer state of its 2 ranks "
                "need 12 MB, 6 MB per rank, without activations; free some, or start fewer ranks per host. "
            ],
        ),
        (  # each on a host, or a GPU, of its own
            reported({"memory_bytes": 11_000_000, "device": "cuda:0"}, {"memory_bytes": 11_000_000, "host": "h1"}),
            [],
        ),
    ],
)
def test_all_problems_are_reported_with_their_numbers(report: RuntimeReport, sentences: list[str]) -> None:
    advice = memory_advice(config(Path("model.onnx")))
    expected = [sentence + advice if sentence.endswith(" ") else sentence for sentence in sentences]
    assert [*problems(report, 2, NEEDS, advice)] == expected


def test_ranks_whose_activations_may_not_fit_are_warned_of() -> None:
    ranks = reported({"memory_bytes": 13_000_000, "host": "h1"}, {"memory_bytes": 10_000_000}).ranks
    found = [*memory_warnings(ranks, NEEDS, memory_advice(config(Path("model.onnx"))))]
    assert len(found) == 1
    assert found[0].startswith(
        "10 MB of memory are free on h0 (cpu), but its rank may need 11 MB: 6 MB per rank, and 5 MB for the "
        "activations of a micro-batch. To need less memory: "
    )


def test_a_run_without_a_rehearsal_needs_memory_for_its_weights_in_external_files_too(tmp_path: Path) -> None:
    onnx.save_model(tiny_transformer(), tmp_path / "model.onnx", save_as_external_data=True, size_threshold=64)
    run = RunDir(tmp_path / "run")
    size = sum(file.stat().st_size for file in tmp_path.glob("*") if file.is_file())
    whole = config(tmp_path / "model.onnx")
    divided = whole.model_copy(update={"parallel": whole.parallel.model_copy(update={"tensor": 2, "zero": 3})})
    assert size > 2 * (tmp_path / "model.onnx").stat().st_size
    assert needs_of(run, whole.model.path, whole.parallel) == Needs(
        rank_bytes=size, checkpoint_bytes=size, model_bytes=size
    )
    assert needs_of(run, divided.model.path, divided.parallel).rank_bytes == size // 4


def test_the_log_says_which_ranks_share_a_gpu_and_how_their_tensors_are_sent() -> None:
    gpu = {"device": "cuda:0", "gpu": "NVIDIA H200", "backend": "gloo"}
    assert [*devices(reported({}, {}).ranks)] == ["2 ranks on h0, cpu; tensors are sent by gloo"]
    assert [*devices(reported(gpu, gpu).ranks)] == [
        "2 ranks on h0, cuda:0 (NVIDIA H200); tensors are sent by gloo through host memory, because several ranks "
        "share the GPU"
    ]
    assert [*devices(reported({**gpu, "backend": "nccl"}).ranks)] == [
        "1 rank on h0, cuda:0 (NVIDIA H200); tensors are sent by nccl"
    ]
