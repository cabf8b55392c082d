"""configure: one directory and one MLflow run per run, however often it is started; nothing for a refused one."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onward.infra.mlflow.mlflow_store import local_store
from onward.infra.mlflow.tracking import Tracker
from onward.tasks.configure import _log, configure
from onward.trainer.config.losses import LossConfig
from onward.trainer.config.section import Section
from onward.trainer.config.sections.audio import AudioConfig
from onward.trainer.config.sections.data import DataConfig
from onward.trainer.config.sections.metrics import StopConfig
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.ranks import LaunchConfig, ParallelConfig, RecomputeConfig
from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.errors import ConfigError, RuntimeUnavailable, UnsupportedModel
from onward.trainer.run.directory import RunDir, onward_home, read_config
from onward.trainer.run.kept_settings import write_settings
from onward.trainer.run.records import Rehearsal, RehearsedBatch, RunIdentity, read_record
from tests.support.graphs import residual_mlps, tiny_conv_net, tiny_mlp
from tests.support.unseen import UNSEEN

pytestmark = pytest.mark.usefixtures("home", "forked")


@pytest.fixture
def sections(tmp_path: Path) -> dict[str, Section]:
    onnx.save_model(tiny_conv_net(num_classes=4), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", image=np.zeros((20, 3, 8, 8), np.float32), label=np.arange(20) % 4)
    return {
        "model": ModelConfig(path=tmp_path / "model.onnx"),
        "data": DataConfig(source=str(tmp_path / "data.npz")),
        "train": TrainConfig(global_batch_size=8, num_steps=4),
        "launch": LaunchConfig(rehearsal="off"),  # tests/tasks/test_rehearsal.py
    }


def begin(sections: dict[str, Section], run_id: str = "") -> RunDir:
    run = RunDir(onward_home() / "runs" / (run_id or onward_home().parent.name))
    configure.fn(run, {"name": "tiny", **sections})
    return run


def identity(run: RunDir) -> RunIdentity:
    return read_record(run.identity, RunIdentity)


def test_a_repeated_configure_finds_the_same_directory_and_mlflow_run(sections: dict[str, Section], store: str) -> None:
    run = begin(sections)
    first = identity(run)
    run.close_log()
    assert read_config(run).train == sections["train"]
    assert begin(sections) == run
    assert identity(run) == first
    assert not run.closed.exists()
    runs = Tracker(store)._client.search_runs(["1"], f"tags.`onward.run_id` = '{first.run_id}'")
    assert [found.info.run_id for found in runs] == [first.mlflow_run_id]
    assert runs[0].data.params["train.num_steps"] == "4"
    assert [file.path for file in Tracker(store)._client.list_artifacts(first.mlflow_run_id)] == ["config.json"]


def test_the_saved_configuration_has_the_only_input_that_takes_audio(sections: dict[str, Section]) -> None:
    folder = onward_home().parent / "sounds"
    folder.mkdir()
    source = UNSEEN["audio folder"](folder)
    audio = AudioConfig(features="log_mel", mel_bins=40, seconds=1.0, axes="channel")
    sections["model"] = ModelConfig(path=folder / "model.onnx")
    sections["data"] = DataConfig(source=str(source), audio=audio)
    run = begin(sections)
    assert read_config(run).data.inputs == {"mel": "audio"}
    assert begin(sections) == run  # a retry is given none


def test_the_saved_configuration_has_the_columns_that_patterns_match(sections: dict[str, Section]) -> None:
    folder = onward_home().parent
    onnx.save_model(tiny_mlp(), folder / "mlp.onnx")
    (folder / "data.csv").write_text("\n".join(["id,b,a,c,d,label", *(f"{n},1,2,3,4,0.5" for n in range(20))]))
    sections["model"] = ModelConfig(path=folder / "mlp.onnx", loss="mse")
    inputs = {"features": ("*", "!id", "!label")}
    sections["data"] = DataConfig(source=str(folder / "data.csv"), inputs=inputs)
    run = begin(sections)
    assert read_config(run).data.inputs == {"features": ("b", "a", "c", "d")}
    assert begin(sections) == run  # a retry is given the patterns again
    sections["data"] = DataConfig(source=str(folder / "data.csv"), inputs={"features": ("*", "!id")})
    with pytest.raises(ConfigError, match="matches label"):
        begin(sections, "other")


def with_softmax(path: Path) -> None:
    """Replace a classifier by one whose output holds probabilities."""
    model = onnx.load(path)
    model.graph.node.append(helper.make_node("Softmax", ["logits"], ["probabilities"]))
    model.graph.output[0].name = "probabilities"
    onnx.save(model, path)


def test_a_run_keeps_and_says_that_its_loss_reads_the_logits(
    sections: dict[str, Section], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_softmax(tmp_path / "model.onnx")
    with caplog.at_level("INFO"):
        run = begin(sections)
    assert read_config(run).model.output == "logits"
    assert "the loss cross_entropy reads 'logits', the logits before Softmax" in caplog.text
    assert begin(sections) == run  # a retry is given no output again
    with pytest.raises(ConfigError, match=r"model\.output was 'logits' when the run began, now 'probabilities'"):
        begin({**sections, "model": ModelConfig(path=tmp_path / "model.onnx", output="probabilities")})


def test_a_run_of_an_earlier_version_goes_on_with_the_probabilities(
    sections: dict[str, Section], tmp_path: Path
) -> None:
    with_softmax(tmp_path / "model.onnx")
    run = begin({**sections, "model": ModelConfig(path=tmp_path / "model.onnx", output="probabilities")})
    saved = read_config(run)
    write_settings(run, saved.model_copy(update={"model": saved.model.model_copy(update={"output": ""})}))
    assert begin(sections) == run
    assert read_config(run).model.output == ""


def test_changed_settings_are_refused_by_name_and_the_saved_ones_are_kept(sections: dict[str, Section]) -> None:
    run = begin(sections)
    before = run.config.read_bytes()
    changed = {**sections, "train": TrainConfig(global_batch_size=4, num_steps=4)}
    with pytest.raises(ConfigError) as refusal:
        begin(changed)
    assert refusal.value.problems[0] == "train.global_batch_size was 8 when the run began, now 4"
    assert run.config.read_bytes() == before


def test_the_limits_of_stop_may_change(sections: dict[str, Section], caplog: pytest.LogCaptureFixture) -> None:
    sections["train"] = TrainConfig(global_batch_size=8, num_steps=4, evaluation_period=1)
    run = begin(sections | {"stop": StopConfig(patience=2)})
    with caplog.at_level("INFO"):
        begin(sections | {"stop": StopConfig(patience=4, max_hours=2)})
    assert read_config(run).stop == StopConfig(patience=4, max_hours=2)
    assert "stop.patience was 2, and is now 4" in caplog.text


def test_a_changed_onnx_file_is_refused(sections: dict[str, Section], tmp_path: Path) -> None:
    begin(sections)
    onnx.save_model(tiny_conv_net(num_classes=4, seed=1), tmp_path / "model.onnx")
    with pytest.raises(ConfigError, match="changed since the run began"):
        begin(sections)


@pytest.mark.parametrize("kind", ["loss", "converter"])
def test_a_changed_file_of_the_users_code_is_refused(sections: dict[str, Section], tmp_path: Path, kind: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def loss(output, labels):\n    return output.sum()\n")
    if kind == "loss":
        given = {**sections, "loss": (LossConfig(name="file", file=f"{file}:loss"),)}
    else:
        given = {**sections, "model": ModelConfig(path=tmp_path / "model.onnx", converters=(file,))}
    run = begin(given)
    assert begin(given) == run
    file.write_text("def loss(output, labels):\n    return 2 * output.sum()\n")
    with pytest.raises(ConfigError, match=r"mine.py changed since the run began.*put the file back"):
        begin(given)


def test_all_problems_are_refused_at_once_and_nothing_is_written(sections: dict[str, Section], home: Path) -> None:
    wrong = {
        **sections,
        "model": ModelConfig(path=home / "absent.onnx"),
        "data": DataConfig(source=str(home / "absent.csv")),
        "parallel": ParallelConfig(data=3),
    }
    with pytest.raises(ConfigError) as refusal:
        begin(wrong)
    assert len(refusal.value.problems) == 3
    assert not home.exists()


def test_the_layout_that_auto_chooses_is_saved_and_kept(sections: dict[str, Section]) -> None:
    launch = LaunchConfig(num_ranks=2, device="cpu", rehearsal="off")
    wanted = {**sections, "parallel": ParallelConfig(sizes="auto", memory_gib=1.0), "launch": launch}
    run = begin(wanted)
    before, chosen = run.config.read_bytes(), read_config(run)
    assert chosen.world_size == 2
    assert chosen.parallel.memory_gib == 1.0
    assert begin(wanted) == run
    assert run.config.read_bytes() == before
    with pytest.raises(ConfigError, match=r"launch.num_ranks was 2 when the run began, now 4"):
        begin({**wanted, "launch": launch.model_copy(update={"num_ranks": 4})})
    given = {"sizes": "auto", "memory_gib": 2.0, "transport": "mpi", "schedule": "gpipe"}
    with pytest.raises(ConfigError) as refusal:
        begin({**wanted, "parallel": ParallelConfig.model_validate(given)})
    for setting in ("memory_gib was 1.0", "transport was 'torch'", "schedule was '1f1b'"):
        assert f"parallel.{setting} when the run began" in str(refusal.value)
    with pytest.raises(ConfigError, match=r"parallel.sizes = 'auto' .* given is parallel.data = 2; leave"):
        begin({**wanted, "parallel": ParallelConfig(sizes="auto", data=2)}, "other")


def test_a_layout_that_the_graph_does_not_allow_is_refused_before_anything_is_written(
    sections: dict[str, Section], home: Path
) -> None:
    train = TrainConfig(global_batch_size=8, num_steps=4, gradient_accumulation_steps=2)
    cut = {**sections, "train": train, "parallel": ParallelConfig(pipeline=2, cuts=("pooled_",))}
    with pytest.raises(ConfigError, match=r"parallel.cuts: the graph computes no tensor pooled_; did you mean "):
        begin(cut)
    with pytest.raises(ConfigError, match=r"recompute.units: no tensor or weight of the graph matches 'layer9\*'"):
        begin({**sections, "recompute": RecomputeConfig(mode="whole", units=("layer9*",))})
    with pytest.raises(ConfigError, match=r"nothing of this graph can be divided over parallel.tensor = 2"):
        begin({**sections, "parallel": ParallelConfig(tensor=2, convolutions="never")})
    assert not (home / "runs").exists()


def test_shapes_that_depend_on_data_are_refused_with_zero_and_allowed_with_tensor_parallelism(
    sections: dict[str, Section], tmp_path: Path
) -> None:
    model = residual_mlps(8, width=4)
    model.graph.node[-1].output[0] = "scores"  # times the number of positive inputs
    model.graph.initializer.append(numpy_helper.from_array(np.array(1), "one"))
    for operator, inputs, result in (
        ("Relu", ["x"], "positive"),
        ("NonZero", ["positive"], "places"),
        ("Shape", ["places"], "shape"),
        ("Gather", ["shape", "one"], "number"),
        ("CastLike", ["number", "scores"], "factor"),
        ("Mul", ["scores", "factor"], "logits"),
    ):
        model.graph.node.append(helper.make_node(operator, inputs, [result]))
    onnx.save_model(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=np.zeros((20, 4), np.float32), label=np.arange(20) % 5)
    with pytest.raises(UnsupportedModel, match=r"depends on data .* parallel.zero = 0"):
        begin({**sections, "parallel": ParallelConfig(zero=1)}, "cut")
    assert begin({**sections, "parallel": ParallelConfig(tensor=2)}, "divided").config.exists()


def test_a_relative_tracking_database_is_saved_as_an_absolute_path(
    sections: dict[str, Section], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    assert identity(begin(sections)).tracking_uri == local_store(tmp_path).replace("/mlflow/", "/")


def test_without_mlflow_a_new_run_is_refused_and_a_resumed_one_continues(
    sections: dict[str, Section], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(sections)
    known = identity(run)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", away)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        with pytest.raises(RuntimeUnavailable, match="start it, or set MLFLOW_TRACKING_URI"):
            begin(sections, "run-2")
        run.identity.write_text(known.model_copy(update={"tracking_uri": away}).model_dump_json())
        assert identity(begin(sections)).mlflow_run_id == known.mlflow_run_id


def test_what_was_not_rehearsed_has_a_consequence_and_lists_say_that_they_are_cut(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batch = RehearsedBatch(what="training", rows=2, loss=1.0, elapsed_s=1.0)
    left = "the guard: the time of the rehearsal, 60 s, was over"
    with caplog.at_level("WARNING"):
        for names in ("abc", "abcdef"):
            _log(Rehearsal(batches=(batch,), not_rehearsed=(left,), without_gradient=tuple(names)), "")
    guard, few, _, many = [record.message for record in caplog.records]
    assert guard.startswith(f"not rehearsed: {left}. An error there would end the run later")
    assert few.startswith("3 weights have no gradient on the first rows")
    assert few.endswith(": a, b, c")
    assert many.endswith(": the first 5 of them are a, b, c, d, e")
