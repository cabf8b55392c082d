"""The training loop reads its inputs once, and refuses labels that no check before it could refuse."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from onward.trainer.checkpoint.train_state import TrainState
from onward.trainer.config.sections.results import CheckpointConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.distributed.processes import MPIContext
from onward.trainer.events import Heartbeat
from onward.trainer.loop import evaluation_is_due, train
from onward.trainer.run.directory import RunDir, read_config
from onward.trainer.run.records import write_record
from tests.support import graphs
from tests.support.ranks import run_ranks
from tests.support.runs import events, final_tensors, make_run, tiny_text, train_run


def parsed_models(mpi: MPIContext, root: str) -> list[str]:
    """Train, and return every ONNX file that was parsed meanwhile: its path, or the digest of its bytes."""
    parsed: list[str] = []

    def counting(load: Any) -> Any:
        def counted(file: Any, *args: Any, **kwargs: Any) -> Any:
            parsed.append(hashlib.sha256(file).hexdigest() if isinstance(file, bytes) else str(file))
            return load(file, *args, **kwargs)

        return counted

    onnx.load, onnx.load_model = counting(onnx.load), counting(onnx.load_model)
    onnx.load_model_from_string = counting(onnx.load_model_from_string)
    run = RunDir(Path(root))
    attempt = run.begin_attempt()
    train(run, mpi, attempt=attempt, heartbeat=Heartbeat(run.heartbeat), stop_requested=lambda: False)
    return parsed


@pytest.mark.mpi
def test_a_run_with_several_evaluations_parses_the_model_once(tmp_path: Path) -> None:
    rows = np.random.default_rng(0)
    columns = {"features": rows.normal(size=(40, 4)).astype(np.float32), "label": np.zeros(40, np.float32)}
    run = make_run(
        tmp_path,
        graphs.tiny_mlp(),
        columns,
        model={"loss": "mse"},
        train={"global_batch_size": 8, "num_steps": 3, "evaluation_period": 1, "deterministic": True},
        precision={"compute": "auto"},
    )
    (parsed,) = run_ranks(1, "tests.trainer.test_loop:parsed_models", str(run.root), timeout_s=120)
    assert len(events(run, "evaluation")) == 4, "before the first step, and after each of three"
    assert [event.compute for event in events(run, "start")] == ["fp32"], "what `auto` is on a CPU"
    digest = hashlib.sha256((tmp_path / "model.onnx").read_bytes()).hexdigest()
    assert parsed == [digest], "its inputs and outputs and its weights are those of one graph"
    waits = [event.values["train/data_wait"] for event in events(run, "scalars")]
    assert len(waits) == 3
    assert all(0 < wait < 1 for wait in waits), "every line has the share of the time in which the rank had no data"
    (start,) = events(run, "start")
    assert start.peak_flops_per_s > 1e8
    for event in events(run, "scalars"):
        values = {name.removeprefix("train/"): value for name, value in event.values.items()}
        per_step = values["tflops"] * 1e12 * values["step_s"]
        assert per_step == pytest.approx(8 * start.flops_per_sample, rel=1e-6)
        assert values["mfu"] == pytest.approx(values["tflops"] * 1e12 / start.peak_flops_per_s, rel=1e-6)
        assert values["memory_bytes"] > 1e8, "torch alone takes more than 100 MB"
        assert "tokens_per_s" not in values, "these columns are no text"


@pytest.mark.mpi
def test_the_defaults_evaluate_each_epoch_and_save_by_time_and_neither_changes_a_bit_of_the_weights(
    tmp_path: Path,
) -> None:
    rows = np.random.default_rng(0)
    columns = {
        "features": rows.normal(size=(40, 4)).astype(np.float32),
        "label": rows.normal(size=40).astype(np.float32),
    }

    def trained(name: str, period: int | str, minutes: float) -> RunDir:
        run = make_run(
            tmp_path / name,
            graphs.tiny_mlp(),
            columns,
            model={"loss": "mse"},
            train={"global_batch_size": 6, "num_steps": 13, "evaluation_period": period, "seed": 3},
            parallel={"data": 2},
            checkpoint={"minutes": minutes, "keep_newest": 20},
        )
        assert train_run(run).step == 13
        return run

    plain, often = trained("plain", 0, 0.0), trained("often", "epoch", 1e-9)
    assert (TrainConfig().evaluation_period, CheckpointConfig().minutes) == ("epoch", 10.0)
    steps = {kind: [event.step for event in events(often, kind)] for kind in ("evaluation", "checkpoint")}
    # 32 rows: an epoch ends in steps 6 (36 samples) and 11 (66), not at a whole number of steps
    assert steps == {"evaluation": [0, 6, 11, 13], "checkpoint": list(range(1, 14))}
    assert [event.step for event in events(plain, "evaluation")] == [0, 13]
    assert [event.step for event in events(plain, "checkpoint")] == [13]
    found, expected = final_tensors(often), final_tensors(plain)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for run in (plain, often):
        assert events(run, "start")[0].peak_flops_per_s > 1e8
        assert all("train/mfu" in event.values for event in events(run, "scalars"))


@pytest.mark.parametrize(
    ("period", "seen", "size", "due"),
    [
        ("epoch", 31, 8, False),
        ("epoch", 32, 8, True),
        ("epoch", 33, 8, True),
        ("epoch", 40, 8, False),
        ("epoch", 96, 64, True),
        (0, 32, 8, False),
        (4, 32, 8, True),
        (3, 32, 8, False),
    ],
)
def test_an_evaluation_is_due_after_the_step_in_which_an_epoch_ends(
    period: Any, seen: int, size: int, due: bool
) -> None:
    state = TrainState(step=4, samples_seen=seen, scaler={}, metrics={})
    assert evaluation_is_due(period, state, size, num_rows=32) == due


@pytest.mark.mpi
def test_a_label_beyond_classes_that_the_file_does_not_declare_is_refused_before_the_loss(tmp_path: Path) -> None:
    model, columns = graphs.tiny_transformer(), tiny_text(40)
    model.graph.output[0].type.tensor_type.shape.dim[-1].dim_param = "classes"
    columns["label"][:, 3] = 32
    run = make_run(tmp_path, model, columns, train={"global_batch_size": 8, "num_steps": 3})
    with pytest.raises(AssertionError, match=r"DataError.*labels 32 in rows .* has 32 of them, 0\.\.31"):
        train_run(run)


@pytest.mark.slow
@pytest.mark.mpi
def test_a_model_may_take_longer_to_load_than_a_step_may_take(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\n\ntime.sleep(7)\n")
    run = make_run(
        tmp_path,
        graphs.tiny_mlp(),
        {"features": np.zeros((40, 4), np.float32), "label": np.zeros(40, np.float32)},
        model={"loss": "mse"},
        train={"global_batch_size": 8, "num_steps": 2},
    )
    config = read_config(run)
    launch = {"start_timeout_s": 90.0, "heartbeat_timeout_s": 4.0}
    update = {
        "launch": config.launch.model_copy(update=launch),
        "model": config.model.model_copy(update={"converters": (tmp_path / "slow.py",)}),
    }
    write_record(run.config, config.model_copy(update=update))
    assert train_run(run).step == 2
