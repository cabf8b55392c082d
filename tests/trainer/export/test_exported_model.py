"""The exported file is the original with trained weights and without training nodes; a wrong file is refused and not
written."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from onward.trainer.config.loading import build_config
from onward.trainer.config.sections.model import ModelConfig
from onward.trainer.config.sections.results import ExportConfig
from onward.trainer.data.schema.signature import model_digest
from onward.trainer.diagnostics.diff import compare
from onward.trainer.errors import CheckpointError, ExportRefused
from onward.trainer.export import exported_model as export
from onward.trainer.export.exported_model import Checkpoint
from onward.trainer.export.file_verification import Expected, verify
from onward.trainer.export.measuring.differences import relative_difference
from onward.trainer.export.measuring.evaluation_data import EvaluationData
from onward.trainer.export.model_file import ModelFile
from onward.trainer.model.metrics.evaluation_metrics import EvaluationMetrics
from onward.trainer.onnx_graph.files.index import all_names
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_graph.surgery.strip_training import strip_training
from onward.trainer.onnx_graph.surgery.surgery import extract_subgraph
from onward.trainer.onnx_import.driver import load_model, to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph, named_weights, stored_weights
from onward.trainer.onnx_import.write_back import write_model
from onward.trainer.run.directory import RunDir
from onward.trainer.run.durable_files import sha256 as digest
from onward.trainer.run.export_folder import example_in
from onward.trainer.run.outcomes.refusals import Refusal, exit_with_refusal, refusal_in
from onward.trainer.run.records import ExportedModel, RunIdentity, read_record, write_record
from tests.support import graphs
from tests.support.losses import metrics_of
from tests.support.packed import matmul_nbits
from tests.support.quantized import quantized

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rows:
    """An evaluation batch."""

    inputs: tuple[Tensor, ...]
    labels: tuple[Tensor | None, ...]
    size: int


@dataclass
class Case:
    """A run directory with a model, a trained module, and evaluation data."""

    run: RunDir
    module: ImportedGraph
    batches: list[Rows]

    def export(self) -> ExportedModel:
        config = ModelConfig(path=self.run.root, loss="output")

        def new_metrics(names: Iterable[str]) -> EvaluationMetrics:
            return metrics_of(config, names)

        data = EvaluationData(batches=lambda: self.batches, new_metrics=new_metrics)
        weights = {name: weight.detach().clone() for name, weight in named_weights(self.module).items()}
        return export.export(self.run, Checkpoint(7, weights), data=data)

    def refused(self) -> tuple[str, ...]:
        """The problems, after making sure that nothing was written."""
        with pytest.raises(ExportRefused) as refusal:
            self.export()
        assert not list(self.run.export.iterdir()) if self.run.export.exists() else True
        return refusal.value.problems


Make = Callable[..., Case]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """make(model) -> a case whose weights were moved as by training."""

    def make(
        model: onnx.ModelProto, *, moved: float = 0.05, sizes: tuple[int, ...] = (6, 6, 3), **settings: Any
    ) -> Case:
        path = tmp_path / "model.onnx"
        path.write_bytes(model.SerializeToString())
        run = RunDir(tmp_path / "run")
        sections = {"train": {"num_steps": 1}, "data": {"source": "digits"}, "model": {"path": path}}
        sections["quantize"] = {"scales": "frozen"}  # as `to_module` below imports it
        write_record(run.config, build_config(sections | {"export": settings}))
        write_record(run.identity, RunIdentity(run_id="1", name="n", created_at="", model_sha256=digest(path)))
        module = to_module(model)
        torch.manual_seed(0)
        with torch.no_grad():
            for weight in named_weights(module).values():
                weight.add_(moved * torch.rand_like(weight))
        batches = [
            Rows(tuple(map(torch.from_numpy, graphs.feed(model, size, seed).values())), (None,), size)
            for seed, size in enumerate((6, 6, 3))
        ]
        return Case(run, module, batches)

    return make


# -- what comes out


@pytest.mark.parametrize("name", graphs.MODELS)
def test_the_file_computes_what_the_trained_module_computes(name: str, make: Make) -> None:
    case = make(graphs.MODELS[name]())
    exported = case.export()
    assert exported.parity < 1e-5
    assert exported.changed == len(named_weights(case.module))
    assert exported.sha256 == digest(exported.path)
    assert read_record(case.run.exported, ExportedModel) == exported


@pytest.mark.parametrize("name", graphs.MODELS)
def test_without_training_the_original_file_is_written(name: str, make: Make) -> None:
    model = graphs.MODELS[name]()
    model.metadata_props.add(key="author", value="nobody")
    exported = make(model, moved=0.0).export()
    assert exported.path.read_bytes() == model.SerializeToString()
    assert exported.changed == 0


@pytest.mark.parametrize("half", [False, True])
def test_the_written_file_is_parsed_once(half: bool, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = graphs.tiny_mlp()
    for tensor in model.graph.initializer if half else ():
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*model.graph.input, *model.graph.output) if half else ():
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    case, parsed = make(model, tolerance=5e-3), list[Path]()
    case.batches = [Rows((torch.randn(6, 4),), (None,), 6)]
    load = onnx.load_model

    def counted(file: Any, *args: Any, **kwargs: Any) -> onnx.ModelProto:
        parsed.append(Path(file))
        return load(file, *args, **kwargs)

    monkeypatch.setattr(onnx, "load_model", counted)
    monkeypatch.setattr(onnx, "load", counted)
    case.export()
    assert len([path for path in parsed if case.run.export in path.parents]) == 1


def test_metrics_are_those_of_the_module_before_and_after_training(make: Make) -> None:
    case = make(graphs.tiny_loss_model())
    exported = case.export()

    def loss(module: ImportedGraph) -> float:
        with torch.no_grad():
            return sum(float(module.eval()(*rows.inputs)) * rows.size for rows in case.batches) / 15

    before = to_module(graphs.tiny_loss_model())
    assert exported.before == {"evaluation/loss": pytest.approx(loss(before), rel=1e-6)}
    assert exported.after == {"evaluation/loss": pytest.approx(loss(case.module), rel=1e-6)}
    assert exported.before != exported.after


def test_the_example_is_one_row_that_onnxruntime_takes(make: Make) -> None:
    case = make(graphs.tiny_bert())
    exported = case.export()
    with np.load(example_in(exported.path.parent)) as example:
        feed = dict(example)
    assert np.array_equal(feed["input_ids"], case.batches[0].inputs[0][:1].numpy())
    onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"]).run(None, feed)


def test_a_file_with_a_fixed_batch_is_verified_in_batches_of_that_size(make: Make) -> None:
    model = graphs.tiny_mlp()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    case = make(model)
    case.batches = [Rows((torch.randn(size, 4),), (None,), size) for size in (6, 4, 1)]
    assert case.export().parity < 1e-5
    with np.load(example_in(case.run.export)) as example:
        assert example["features"].shape == (4, 4)


def test_a_half_precision_file_is_rounded_once_and_keeps_its_type(make: Make) -> None:
    model = graphs.tiny_mlp()
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    case = make(model, tolerance=5e-3)
    case.batches = [Rows((torch.randn(6, 4),), (None,), 6)]
    exported = case.export()
    assert 0 < exported.parity < 5e-3
    assert {tensor.data_type for tensor in onnx.load(exported.path).graph.initializer} == {TensorProto.FLOAT16}


# -- what only training needs


def test_rounding_to_half_precision_does_not_count_as_a_difference(make: Make) -> None:
    model, half = graphs.tiny_transformer(), helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(half), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.BFLOAT16
    case = make(model, moved=0.5)
    exported = case.export()
    assert exported.parity < 1e-4, "with the weights as they were before rounding it is 3e-3"


def test_weights_in_a_directory_below_the_model_stay_there(make: Make) -> None:
    model = graphs.tiny_mlp()
    case = make(graphs.tiny_mlp())
    path = case.run.root.parent / "model.onnx"
    (path.parent / "below").mkdir()
    onnx.save(model, path, save_as_external_data=True, location="below/weights.bin", size_threshold=0)
    identity = RunIdentity(run_id="1", name="n", created_at="", model_sha256=model_digest(path))
    write_record(case.run.identity, identity)
    exported = case.export()
    assert exported.beside == (case.run.export / "below" / "weights.bin",)
    assert exported.sha256 == model_digest(exported.path) != digest(exported.path)
    feed = graphs.feed(graphs.tiny_mlp(), 3)
    (found,) = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"]).run(None, feed)
    with torch.no_grad():
        wanted = case.module.eval()(*map(torch.from_numpy, feed.values()))
    assert np.allclose(found, wanted.numpy(), atol=1e-5)


def test_leftovers_of_a_killed_export_are_removed(make: Make) -> None:
    case = make(graphs.tiny_mlp())
    left = case.run.export / ".verifying-dead"
    left.mkdir(parents=True)
    (left / "model.onnx").write_bytes(b"half")
    case.export()
    assert sorted(path.name for path in case.run.export.iterdir()) == [
        "changes.json",
        "example.npz",
        "model.json",
        "model.onnx",
    ]


def test_a_full_disk_is_refused_with_a_sentence_and_leaves_no_file(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(graphs.tiny_mlp())

    def full(*_: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("onward.trainer.export.exported_model.write_model", full)
    with pytest.raises(SystemExit) as ended, exit_with_refusal(case.run.export):
        case.export()
    assert ended.value.code == 3
    refusal = read_record(refusal_in(case.run.export), Refusal)
    assert refusal.kind == "StorageUnavailable"
    assert refusal.problems[0].startswith(f"No space left on device: the disk of {case.run.export} has ")
    assert [path.name for path in case.run.export.iterdir()] == ["refused.json"]


def test_dropout_and_tensors_that_only_it_read_are_removed(make: Make) -> None:
    exported = make(graphs.tiny_transformer(dropout=0.1), moved=0.0).export()
    without = graphs.tiny_transformer(dropout=0.0)
    written = onnx.load(exported.path)
    assert [node.op_type for node in written.graph.node] == [node.op_type for node in without.graph.node]
    assert sorted(written.graph.initializer, key=str) == sorted(without.graph.initializer, key=str)
    assert exported.removed == {"Dropout": 7}


@pytest.mark.slow
def test_training_nodes_stay_where_the_configuration_keeps_them_and_diff_explains_what_goes(make: Make) -> None:
    model = graphs.tiny_transformer(dropout=0.1)
    for keep in (False, True):
        case = make(model, moved=0.0, strip_training=not keep)
        exported = case.export()
        difference = compare(case.run.root.parent / "model.onnx", exported.path)
        if keep:
            assert exported.removed == {}
            assert difference.same
            assert onnx.load(exported.path).SerializeToString() == model.SerializeToString()
        else:
            assert difference.stripped == exported.removed == {"Dropout": 7}
            assert (difference.nodes, difference.tensors, difference.same) == ((), (), False)


@pytest.mark.parametrize("masks", [False, True])
def test_a_kept_dropout_in_training_mode_loses_only_that_mode(masks: bool) -> None:
    model = dropout_in_training_mode(masks=masks, last=False)
    assert strip_training(model, keep=all_names(model.graph)) == {"Dropout training mode": 1}
    assert [node.op_type for node in model.graph.node] == ["Add", "Dropout", "Relu"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert np.array_equal(session.run(["y"], {"features": np.ones((2, 4), np.float32)})[0], np.full((2, 4), 2.0))


def dropout_in_training_mode(*, masks: bool, last: bool) -> onnx.ModelProto:
    """x -> Dropout -> (Relu ->) y, with ratio and training mode computed by nodes of their own."""
    g = GraphWriter("dropout")
    x = g.input("features", ("batch", 4))
    g.op("Add", x, g.weight("bias", np.ones(4, np.float32)), outputs="sum")
    mode = g.op("Cast", g.weight("on", np.array(1)), to=TensorProto.BOOL)
    g.op(
        "Dropout", "sum", g.weight("ratio", 0.5), mode, outputs=["y" if last else "kept", *(["mask"] if masks else [])]
    )
    if not last:
        g.op("Relu", "kept", outputs="y")
    g.output("y", ("batch", 4))
    if masks:
        g.output("mask", ("batch", 4), TensorProto.BOOL)
    return g.model()


@pytest.mark.parametrize(
    ("masks", "last", "left"),
    [
        (False, False, [("Add", "features", "bias"), ("Relu", "sum")]),
        (False, True, [("Add", "features", "bias"), ("Dropout", "sum", "ratio")]),
        (True, False, [("Add", "features", "bias"), ("Dropout", "sum", "ratio"), ("Relu", "kept")]),
    ],
    ids=["inside", "gives-an-output", "mask-in-use"],
)
def test_a_dropout_in_training_mode_is_the_identity(masks: bool, last: bool, left: list[tuple[str, ...]]) -> None:
    model = dropout_in_training_mode(masks=masks, last=last)
    outputs = list(model.graph.output)
    strip_training(model)
    onnx.checker.check_model(model, full_check=True)
    assert [(node.op_type, *node.input) for node in model.graph.node] == left
    assert [tensor.name for tensor in model.graph.initializer] == ["bias", "ratio"][: 1 + (len(left[1]) == 3)]
    assert list(model.graph.output) == outputs
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert np.array_equal(session.run(["y"], {"features": np.ones((2, 4), np.float32)})[0], np.full((2, 4), 2.0))


@pytest.mark.parametrize("read", [False, True])
def test_batch_normalization_no_longer_updates_its_statistics(read: bool, make: Make) -> None:
    model = graphs.tiny_conv_net_with_batch_norm()
    plain = onnx.ModelProto.FromString(model.SerializeToString())
    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    for number, node in enumerate(norms):
        node.attribute.append(helper.make_attribute("training_mode", 1))
        node.output.extend([f"mean.{number}", f"variance.{number}"])
    if read:
        model.graph.output.append(helper.make_tensor_value_info("mean.0", TensorProto.FLOAT, [8]))
    trained = onnx.ModelProto.FromString(model.SerializeToString())
    assert strip_training(trained) == {"BatchNormalization update": 2}
    onnx.checker.check_model(trained, full_check=True)
    left = [node for node in trained.graph.node if node.op_type != "Identity"]
    assert left == list(plain.graph.node)
    if not read:
        assert make(model).export().parity < 1e-5


# -- what is refused

Mutation = Callable[[dict[str, onnx.TensorProto], onnx.GraphProto], None]


def _set(tensor: onnx.TensorProto, array: graphs.Array) -> None:
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), tensor.name))


def _perturb(tensors: dict[str, onnx.TensorProto], _: onnx.GraphProto) -> None:
    _set(tensors["fc2.weight"], numpy_helper.to_array(tensors["fc2.weight"]) + np.float32(0.25))


def _transpose(tensors: dict[str, onnx.TensorProto], _: onnx.GraphProto) -> None:
    _set(tensors["fc1.weight"], numpy_helper.to_array(tensors["fc1.weight"]).T)


def _swap(tensors: dict[str, onnx.TensorProto], _: onnx.GraphProto) -> None:
    arrays = [numpy_helper.to_array(tensors[name]).copy() for name in ("fc1.bias", "fc2.bias")]
    _set(tensors["fc1.bias"], arrays[1])
    _set(tensors["fc2.bias"], arrays[0])


def _drop_transpose(_: dict[str, onnx.TensorProto], inner: onnx.GraphProto) -> None:
    gemm = next(node for node in inner.node if node.op_type == "Gemm")
    next(attribute for attribute in gemm.attribute if attribute.name == "transB").i = 0


def _nan(tensors: dict[str, onnx.TensorProto], _: onnx.GraphProto) -> None:
    _set(tensors["fc2.bias"], np.full(16, np.nan, np.float32))


def _rename(_: dict[str, onnx.TensorProto], inner: onnx.GraphProto) -> None:
    inner.input[0].name = inner.node[0].input[0] = "renamed"


@pytest.mark.parametrize(
    ("mutate", "sentences"),
    [
        (_perturb, ["initializer 'fc2.weight' differs from the checkpoint by up to 0.25;", "output 'prediction'"]),
        (_transpose, ["initializer 'fc1.weight' differs", "output 'prediction'"]),
        (_swap, ["initializer 'fc1.bias' differs", "initializer 'fc2.bias' differs", "output 'prediction'"]),
        (_drop_transpose, ["1 of the original's 3 nodes", "output 'prediction'"]),
        (_nan, ["initializer 'fc2.bias' differs", "output 'prediction'"]),
        (_rename, ["1 of the original's 1 inputs are not the same", "1 of the original's 3 nodes"]),
    ],
)
def test_a_wrongly_written_file_is_refused_with_every_difference(
    mutate: Mutation, sentences: list[str], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make(graphs.tiny_mlp(inputs=16, hidden=16, outputs=16))
    right = write_model

    def wrong(module: ImportedGraph, model: onnx.ModelProto, source: Path, target: Path, **_: Any) -> list[Path]:
        files = right(module, model, source, target)
        written = onnx.load(target)
        mutate({tensor.name: tensor for tensor in written.graph.initializer}, written.graph)
        target.write_bytes(written.SerializeToString())
        return files

    monkeypatch.setattr("onward.trainer.export.exported_model.write_model", wrong)
    problems = case.refused()
    assert len(problems) == len(sentences)
    for problem, sentence in zip(problems, sentences, strict=True):
        assert problem.startswith(sentence)
    if sentences[-1].startswith("output"):
        assert "above export.tolerance 0.001" in problems[-1]
        assert "greatest difference" in problems[-1]


def test_weights_that_were_not_written_at_all_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(graphs.tiny_mlp())

    def stale(module: ImportedGraph, model: onnx.ModelProto, source: Path, target: Path, **_: Any) -> list[Path]:
        target.write_bytes(source.read_bytes())
        return [target]

    monkeypatch.setattr("onward.trainer.export.exported_model.write_model", stale)
    assert sum("differs from the checkpoint" in problem for problem in case.refused()) == 4


@pytest.mark.slow
def test_a_file_that_rounds_to_integers_is_refused_with_the_setting_for_it(make: Make) -> None:
    case = make(quantized("tiny_transformer"))
    problems = case.refused()  # onnxruntime's fused kernels choose other neighbours
    assert problems
    assert all("the file rounds to integers" in problem and "export.tolerance says" in problem for problem in problems)


def test_what_kernels_round_is_in_the_record_of_the_exported_file(make: Make) -> None:
    case = make(matmul_nbits(level=4, bias=True)[0])
    exported = case.export()
    assert 1e-3 < exported.rounding < 0.05
    assert 1e-3 < exported.parity <= exported.rounding + 2e-3
    # the integers and their scales are the file's own
    before, after = (onnx.load(path).graph.initializer for path in (case.run.root.parent / "model.onnx", exported.path))
    assert [a.name for a, b in zip(before, after, strict=True) if a != b] == ["bias"]


def test_a_module_that_diverged_is_refused(make: Make) -> None:
    case = make(graphs.tiny_mlp())
    with torch.no_grad():
        named_weights(case.module)["fc2.bias"].fill_(torch.nan)
    (problem,) = case.refused()
    assert "nan off the torch module" in problem


def test_another_original_is_refused(make: Make) -> None:
    case = make(graphs.tiny_mlp())
    source = case.run.root.parent / "model.onnx"
    source.write_bytes(graphs.tiny_mlp(seed=1).SerializeToString())
    assert "changed since the run began" in case.refused()[0]
    source.unlink()
    assert "now gone" in case.refused()[0]


def test_a_checkpoint_of_another_model_is_refused(make: Make) -> None:
    case = make(graphs.tiny_mlp())
    case.module = to_module(graphs.tiny_conv_net())
    with pytest.raises(CheckpointError, match="another model"):
        case.export()


def test_an_export_without_evaluation_data_is_refused(make: Make) -> None:
    case = make(graphs.tiny_loss_model())
    case.batches = []
    assert "no evaluation data" in case.refused()[0]


def test_a_refusal_is_left_as_data_with_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended, exit_with_refusal(tmp_path):
        raise ExportRefused(["one", "two"])
    assert ended.value.code == 5
    assert read_record(refusal_in(tmp_path), Refusal) == Refusal(kind="ExportRefused", problems=("one", "two"))


@pytest.mark.parametrize(
    ("ours", "theirs", "relative"),
    [
        ([1.0, -4.0], [1.0, -3.0], 0.25),
        ([0.0, 0.0], [0.0, 0.5], 0.5),
        ([-np.inf, 2.0], [-np.inf, 2.0], 0.0),
        ([-np.inf, 2.0], [0.0, 2.0], np.inf),
        ([np.nan, 2.0], [np.nan, 2.0], np.nan),
        ([1.0], [1.0, 1.0], np.nan),
        ([], [], 0.0),
    ],
)
def test_differences_are_relative_to_the_greatest_value(
    ours: list[float], theirs: list[float], relative: float
) -> None:
    assert relative_difference(np.array(ours), np.array(theirs))[0] == pytest.approx(relative, nan_ok=True)


def test_a_partly_trained_model_called_part_is_not_overwritten_by_the_part_that_is_compared(tmp_path: Path) -> None:
    source, file = tmp_path / "in" / "part.onnx", tmp_path / "out" / "part.onnx"
    source.parent.mkdir()
    onnx.save(graphs.tiny_mlp(hidden=64), source, save_as_external_data=True, location="weights.bin", size_threshold=64)
    file.parent.mkdir()
    model = load_model(source)
    inner = next(node.output[0] for node in model.graph.node if node.op_type == "Relu")
    config = ModelConfig(path=source, loss="output", output=inner)
    module = to_module(extract_subgraph(model, config), base=source.parent).eval()
    write_model(module, model, source, file)
    content = file.read_bytes()
    batches = [Rows((torch.randn(3, 4),), (None,), 3)]

    def new_metrics(names: Iterable[str]) -> EvaluationMetrics:
        return metrics_of(config, names)

    data = EvaluationData(batches=lambda: batches, new_metrics=new_metrics)
    weights = {name: tensor.detach() for name, tensor in stored_weights(module).items()}
    expected = Expected(ModelFile(source, model), weights, module, config)
    assert verify(ModelFile.read(file), expected, data=data, config=ExportConfig()).parity < 1e-6
    assert file.read_bytes() == content
