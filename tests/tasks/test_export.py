"""The export task: which checkpoint it exports, and how it registers the file in a real MLflow store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from onward.infra.mlflow.tracking import Tracker
from onward.tasks import export as task
from onward.trainer.config.loading import build_config
from onward.trainer.config.sections.results import ExportConfig
from onward.trainer.diagnostics.export_conflicts import files_in_the_way
from onward.trainer.errors import CheckpointError, ConfigError, ExportRefused, RuntimeUnavailable
from onward.trainer.events import Evaluated, EventWriter
from onward.trainer.onnx_graph.files.whole_models import write_whole
from onward.trainer.run.directory import RunDir
from onward.trainer.run.durable_files import sha256
from onward.trainer.run.recorded.exported_files import not_ours, remember
from onward.trainer.run.records import (
    CheckpointInfo,
    ExportedModel,
    RunIdentity,
    TrainResult,
    Variant,
    read_record,
    write_record,
)
from tests.support.exporting import PARITY
from tests.support.graphs import tiny_mlp
from tests.support.stores import client, free_port, new_run, points

RESULT = TrainResult(status="done", attempts=2, step=20, samples_seen=160, metrics={}, elapsed_s=1.0)

Process = Callable[[str], None]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    """process("crash") replaces the exporting process by that of tests/support/exporting.py."""
    return lambda what: monkeypatch.setattr(task, "PROCESS", ("tests.support.exporting", what))


def make_run(folder: Path, tracker: Tracker, **settings: Any) -> RunDir:
    """Return a run directory with what the task reads of a finished training."""
    run = RunDir(folder / "run")
    sections = {"train": {"num_steps": 20}, "data": {"source": "digits"}, "model": {"path": folder / "model.onnx"}}
    write_record(run.config, build_config({"name": folder.name, **sections, "export": settings}))
    identify(run, tracker)
    return run


def identify(run: RunDir, tracker: Tracker) -> None:
    identity = RunIdentity(run_id="run", name="run", created_at="", model_sha256="")
    where = {"mlflow_run_id": tracker.run_id, "tracking_uri": tracker.tracking_uri}
    write_record(run.identity, identity.model_copy(update=where))


def infos(run: RunDir, *steps: int, best: int = 0) -> list[CheckpointInfo]:
    return [
        CheckpointInfo(step=step, path=run.checkpoint(step), bytes=1, digest="", metrics={}, best=step == best)
        for step in steps
    ]


# -- which checkpoint


@pytest.mark.parametrize(
    ("which", "best", "step"), [("best", 10, 10), ("best", 0, 20), ("last", 10, 20), ("last", 20, 20)]
)
def test_the_best_or_the_last_checkpoint_is_selected(which: str, best: int, step: int) -> None:
    assert task.choose(infos(RunDir(Path("run")), 10, 20, 15, best=best), which).step == step


def test_exporting_without_a_checkpoint_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="train first"):
        task.choose([], "best")


# -- a proven file


def test_a_verified_file_is_registered_with_signature_example_and_alias(tmp_path: Path, process: Process) -> None:
    process("export")
    tracker = new_run()
    run = make_run(tmp_path, tracker, register_as="exports", alias="best-yet")
    log = EventWriter(run.events, attempt=1, rank=0)
    log.emit(Evaluated(step=10, values={"evaluation/loss": 0.5001, "evaluation/accuracy": 0.75}))
    log.close()
    exported = task.export.fn(run, RESULT, infos(run, 10, 20, best=10))

    assert (exported.registered_as, exported.version) == ("exports", "1")
    assert read_record(run.exported, ExportedModel) == exported
    version = client(tracker).get_model_version_by_alias("exports", "best-yet")
    folder = Path(version.source.removeprefix("file://"))
    assert version.tags == {
        "step": "10",
        "checkpoint": "step-000000010",
        "attempts": "2",
        "sha256": exported.sha256,
        "evaluation/loss": "0.5",
        "onward.result": "loss 2 -> 0.5",
        "onward.trained_from": str(tmp_path / "model.onnx"),
        "onward.data": "digits",
        "onward.run_id": "run",
        "onward.promotion": "served",
        "onward.promotion_reason": "it is the first best-yet of its name",
    }
    assert (folder / "model.onnx").read_bytes() == exported.path.read_bytes()
    assert '"shape": [-1, 4]' in (folder / "MLmodel").read_text()
    assert (folder / "input_example.json").exists()
    assert points(tracker, "exported/parity") == [(10, PARITY)]
    assert points(tracker, "evaluation/loss") == [(10, 0.5001)], "the point of the log, which differs by rounding"
    (model,) = tracker._models(f"tags.sha256 = '{exported.sha256}'")
    assert {metric.key: metric.value for metric in model.metrics} == {
        "evaluation/loss": 0.5001,
        "evaluation/accuracy": 0.75,
        "exported/parity": PARITY,
    }
    tags = client(tracker).get_run(tracker.run_id).data.tags
    assert (tags["onward.result"], tags["onward.version"]) == ("loss 2 -> 0.5", "exports 1")
    assert tags["mlflow.note.content"].startswith("**loss 2 -> 0.5**\n")
    assert "Trained from `" in version.description
    artifacts = client(tracker).list_artifacts(tracker.run_id, "export")
    assert [file.path for file in artifacts] == ["export/README.md", "export/model.json"]
    assert (folder / "README.md").read_bytes() == (run.export / "README.md").read_bytes(), "the card is with the model"


def test_a_repeated_task_neither_exports_nor_registers_again(tmp_path: Path, process: Process) -> None:
    process("export")
    run = make_run(tmp_path, new_run(), register_as="repeated")
    first = task.export.fn(run, RESULT, infos(run, 20))
    process("crash")
    assert task.export.fn(run, RESULT, infos(run, 20)) == first
    with pytest.raises(ExportRefused, match="signal 11"):  # another checkpoint is another file
        task.export.fn(run, RESULT, infos(run, 30))


def test_a_damaged_file_is_exported_again(tmp_path: Path, process: Process) -> None:
    process("export")
    run = make_run(tmp_path, new_run(), register_as="damaged")
    first = task.export.fn(run, RESULT, infos(run, 20))
    first.path.write_bytes(b"damaged")
    again = task.export.fn(run, RESULT, infos(run, 20))
    assert again.promotion is not None
    assert again.promotion.reason == "it is the champion already"
    assert again.model_copy(update={"promotion": first.promotion}) == first
    assert first.path.read_bytes() != b"damaged"


def test_an_outage_of_mlflow_loses_nothing(tmp_path: Path, process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    process("export")
    monkeypatch.setattr(task, "tries_within", lambda patience_s: range(2))
    monkeypatch.setattr("onward.tasks.shown.mlflow_outages.PERIOD_S", 0.0)
    copy = tmp_path / "deployed" / "digits.onnx"
    run = make_run(tmp_path, Tracker(f"http://127.0.0.1:{free_port()}", "1"), register_as="late", path=str(copy))
    with pytest.raises(RuntimeUnavailable, match=r"tried 2 times.*complete at .*model\.onnx.*onward resume"):
        task.export.fn(run, RESULT, infos(run, 20))
    assert copy.read_bytes() == (run.export / "model.onnx").read_bytes()

    identify(run, new_run())
    process("crash")
    assert task.export.fn(run, RESULT, infos(run, 20)).version == "1"


def test_the_file_is_registered_even_if_its_copy_cannot_be_written(tmp_path: Path, process: Process) -> None:
    process("export")
    (tmp_path / "file").touch()
    tracker, target = new_run(), tmp_path / "file" / "model.onnx"
    run = make_run(tmp_path, tracker, register_as="kept", path=str(target))
    with pytest.raises(RuntimeUnavailable, match=f"cannot write the exported file to {target}"):
        task.export.fn(run, RESULT, infos(run, 20))
    assert read_record(run.exported, ExportedModel).registered_as == "kept"
    version = client(tracker).get_model_version_by_alias("kept", "champion")
    assert version.tags["sha256"] == sha256(run.export / "model.onnx")


def test_a_refusal_by_mlflow_is_raised_without_a_retry(tmp_path: Path, process: Process) -> None:
    process("export")
    tracker = new_run()
    run = make_run(tmp_path, Tracker(tracker.tracking_uri, "f" * 32), register_as="refused-run")
    with pytest.raises(RuntimeUnavailable, match=r"refused: .*complete at .*model\.onnx"):
        task.export.fn(run, RESULT, infos(run, 20))


def test_an_export_to_a_path_does_not_change_the_run_directory(tmp_path: Path, process: Process) -> None:
    process("export")
    run = make_run(tmp_path, new_run())
    exported = task.export_file(run, run.checkpoint(7), tmp_path / "out" / "seven.onnx")
    assert exported.path == tmp_path / "out" / "seven.onnx"
    assert exported.step == 7
    assert sorted((tmp_path / "out").iterdir()) == [tmp_path / "out" / "seven.README.md", exported.path]
    assert not run.export.exists()


def test_an_export_over_the_original_is_refused_before_it_starts(tmp_path: Path, process: Process) -> None:
    process("crash")
    run = make_run(tmp_path, new_run())
    (tmp_path / "model.onnx").write_bytes(tiny_mlp().SerializeToString())
    with pytest.raises(ConfigError, match=r"model\.onnx is the model that is trained; choose another name"):
        task.export_file(run, run.checkpoint(7), tmp_path / "model.onnx")
    with pytest.raises(ConfigError, match="is a directory"):
        task.export_file(run, run.checkpoint(7), tmp_path)


@pytest.mark.slow
def test_an_existing_file_that_no_export_has_written_is_kept(tmp_path: Path, process: Process, home: Path) -> None:
    process("export")
    run, target = make_run(tmp_path, new_run()), tmp_path / "out" / "seven.onnx"
    target.parent.mkdir()
    target.write_text("the only copy")
    with pytest.raises(ConfigError, match=r"seven\.onnx exists, and no export has left it so; choose another name"):
        task.export_file(run, run.checkpoint(7), target)
    assert target.read_text() == "the only copy"
    task.export_file(run, run.checkpoint(7), target, extras=ExportConfig(overwrite=True))
    assert target.read_bytes() != b"the only copy"
    task.export_file(run, run.checkpoint(8), target)  # that of the night before
    target.write_text("edited by hand")
    with pytest.raises(ConfigError, match="no export has left it so"):
        task.export_file(run, run.checkpoint(9), target)
    target.unlink()
    task.export_file(run, run.checkpoint(9), target)


def test_a_file_that_came_during_the_training_is_kept_and_so_is_a_neighbour(
    tmp_path: Path, process: Process, home: Path
) -> None:
    process("export")
    target = tmp_path / "out" / "model.onnx"
    run = make_run(tmp_path, new_run(), path=str(target))
    target.parent.mkdir()
    target.write_text("mine")
    with pytest.raises(RuntimeUnavailable, match=r"stays at .*model\.onnx: .*/out/model\.onnx exists"):
        task.export.fn(run, RESULT, infos(run, 20))
    assert target.read_text() == "mine"
    target.unlink()
    task.export.fn(run, RESULT, infos(run, 20))  # as `onward resume` does
    exported = read_record(run.exported, ExportedModel)
    notes = run.export / "preprocessing.json"
    notes.write_text("{}")
    neighbour = tmp_path / "out" / "model.preprocessing" / "preprocessing.json"
    neighbour.parent.mkdir()
    neighbour.write_text("notes of mine")
    with pytest.raises(RuntimeUnavailable, match=r"preprocessing\.json exists"):
        task.copy_to(target, exported.model_copy(update={"preprocessing": (notes,)}), source=tmp_path / "model.onnx")
    assert neighbour.read_text() == "notes of mine"


@pytest.mark.slow
def test_a_crash_between_the_record_and_the_file_does_not_stop_the_next_export(
    tmp_path: Path, process: Process, home: Path
) -> None:
    process("export")
    run, target = make_run(tmp_path, new_run()), tmp_path / "out" / "seven.onnx"
    task.export_file(run, run.checkpoint(7), target)
    new = tmp_path / "new"
    new.write_text("of the next night")
    remember(target, new)  # and then the power went
    assert not_ours([target]) == []
    target.write_text("of the next night")
    assert not_ours([target]) == []
    task.export_file(run, run.checkpoint(7), target)


def test_an_export_from_before_the_records_is_known_by_its_run(tmp_path: Path, process: Process, home: Path) -> None:
    process("export")
    target = tmp_path / "out" / "model.onnx"
    run = make_run(tmp_path, new_run(), path=str(target))
    task.export.fn(run, RESULT, infos(run, 20))
    shutil.rmtree(home / "exports")
    assert files_in_the_way(target), "and without the run it is not known"
    (home / "runs").mkdir()
    (home / "runs" / "one").symlink_to(run.root)
    assert files_in_the_way(target) == []


def test_external_data_is_copied_into_the_same_subdirectory_and_what_describes_inputs_beside(
    tmp_path: Path, process: Process
) -> None:
    process("export")
    run = make_run(tmp_path, new_run())
    exported = task.export_file(run, run.checkpoint(7))
    side = run.export / "below" / "weights.bin"
    side.parent.mkdir()
    side.write_bytes(b"weights")
    recipe = run.export / "preprocessing.json"
    recipe.write_text("{}")
    exported = exported.model_copy(update={"beside": (side,), "preprocessing": (recipe,)})
    copied = task.copy_to(tmp_path / "out" / "seven.onnx", exported, source=tmp_path / "model.onnx")
    assert copied.beside == (tmp_path / "out" / "below" / "weights.bin",)
    assert copied.beside[0].read_bytes() == b"weights"
    assert copied.card == tmp_path / "out" / "seven.README.md", "the folder may have a README of its own"
    assert copied.card.read_text() == (run.export / "README.md").read_text()
    assert copied.preprocessing == (tmp_path / "out" / "seven.preprocessing" / "preprocessing.json",)
    assert copied.preprocessing[0].read_text() == "{}"


def with_a_variant(folder: Path, model: onnx.ModelProto, *, most: int) -> ExportedModel:
    """Write an exported file and its variant `fp16`, which has a data file if it has more than `most` bytes."""
    folder.mkdir()
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    path = folder / "model.fp16.onnx"
    data = write_whole(model, path, most=most)
    variant = Variant(kind="fp16", path=path, data=data, bytes=1, size_ratio=1, latency_ratio=1, metrics={})
    return ExportedModel(
        path=folder / "model.onnx", sha256="", step=1, parity=0, before={}, after={}, changed=0, variants=(variant,)
    )


def test_a_variant_with_a_data_file_is_copied_under_a_new_name_and_still_loads(tmp_path: Path) -> None:
    model = tiny_mlp()
    exported = with_a_variant(tmp_path / "export", model, most=100)
    # twice: the second copy replaces the first
    for _ in range(2):
        copied = task.copy_to(tmp_path / "out" / "a.onnx", exported, source=tmp_path / "given.onnx")
    (variant,) = copied.variants
    assert variant.data == tmp_path / "out" / "a.fp16.onnx.data"
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"a.onnx", "a.fp16.onnx", "a.fp16.onnx.data"}
    assert variant.path is not None
    assert onnx.load(variant.path).graph.node == model.graph.node
    (tmp_path / "out" / "a.fp16.onnx.data").write_bytes(b"of somebody")
    with pytest.raises(RuntimeUnavailable, match="no export has left it so"):
        task.copy_to(tmp_path / "out" / "a.onnx", exported, source=tmp_path / "given.onnx")


def test_a_copy_that_is_cut_off_leaves_no_variant_beside_the_data_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = with_a_variant(tmp_path / "old", tiny_mlp(hidden=512, seed=1), most=100)
    new = with_a_variant(tmp_path / "new", tiny_mlp(hidden=512, seed=2), most=100)
    target, source = tmp_path / "out" / "a.onnx", tmp_path / "given.onnx"
    copied, data = target.with_name("a.fp16.onnx"), target.with_name("a.fp16.onnx.data")
    task.copy_to(target, old, source=source)
    before = data.read_bytes()
    copy = shutil.copyfile

    def die(name: str) -> None:
        def copyfile(file: Path, place: Path) -> Path:
            if place.name == f".{name}.{os.getpid()}.partial":
                raise KeyboardInterrupt
            return copy(file, place)

        monkeypatch.setattr(shutil, "copyfile", copyfile)
        with pytest.raises(KeyboardInterrupt):
            task.copy_to(target, new, source=source)
        monkeypatch.setattr(shutil, "copyfile", copy)

    die(data.name)
    assert (copied.exists(), data.read_bytes()) == (True, before), "both are the old ones"
    die(copied.name)
    assert not copied.exists()
    assert data.read_bytes() != before
    task.copy_to(target, new, source=source)
    onnx.load(copied)


def test_the_data_file_of_a_variant_goes_with_it_unless_somebody_has_changed_it(tmp_path: Path) -> None:
    two_files = with_a_variant(tmp_path / "two", tiny_mlp(hidden=512), most=100)
    one_file = with_a_variant(tmp_path / "one", tiny_mlp(hidden=512), most=10**9)
    target, source = tmp_path / "out" / "a.onnx", tmp_path / "given.onnx"
    data = target.with_name("a.fp16.onnx.data")
    task.copy_to(target, two_files, source=source)
    task.copy_to(target, one_file, source=source)
    assert {file.name for file in target.parent.iterdir()} == {"a.onnx", "a.fp16.onnx"}
    task.copy_to(target, two_files, source=source)
    data.write_bytes(data.read_bytes() + b"of somebody")
    task.copy_to(target, one_file, source=source)
    assert data.read_bytes().endswith(b"of somebody")


# -- a refused one


def test_a_refusal_of_the_exporting_process_is_raised_here_and_nothing_is_registered(
    tmp_path: Path, process: Process
) -> None:
    process("export")
    tracker = new_run()
    run = make_run(tmp_path, tracker, register_as="refused")
    task.export_file(run, run.checkpoint(10))
    process("refuse")
    with pytest.raises(ExportRefused) as refused:
        task.export.fn(run, RESULT, infos(run, 20))
    assert refused.value.problems == ("this is wrong", "and that")
    assert not run.exported.exists()  # nor does the file of another checkpoint count any more
    assert not client(tracker).search_registered_models("name = 'refused'")


def test_a_crash_of_the_exporting_process_is_raised_with_the_end_of_its_log(tmp_path: Path, process: Process) -> None:
    process("crash")
    run = make_run(tmp_path, new_run())
    with pytest.raises(ExportRefused, match=r"signal 11(.|\n)*the last word"):
        task.export_file(run, run.checkpoint(10))


def test_a_variant_whose_process_crashes_is_recorded_and_the_exported_file_is_kept(
    tmp_path: Path, process: Process
) -> None:
    process("export")
    run = make_run(tmp_path, new_run(), variants=["int8_static"])
    exported = task.export_file(run, run.checkpoint(20))
    (variant,) = exported.variants
    assert variant.path is None
    assert variant.refused.startswith("its process ended with signal 11")
    assert "the last word" in variant.refused
    assert exported.path.exists()
    assert read_record(run.exported, ExportedModel) == exported
