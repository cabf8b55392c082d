"""Every loss that the files can have: values and gradients of onnxruntime are those of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from onward.trainer.config.loading import build_config
from onward.trainer.config.loss_rules import LOSS_RULES, LossName
from onward.trainer.config.losses import LossConfig
from onward.trainer.errors import ConfigError, ExportRefused, UnsupportedModel
from onward.trainer.export.training.files import write_artifacts
from onward.trainer.export.training.gradients import gradient_of, training_model
from onward.trainer.export.training.loss_graph import evaluation_model, loss_names, model_with_loss
from onward.trainer.export.training.loss_nodes import FORMULAS
from onward.trainer.model.losses.dense_heads.families import FAMILIES
from onward.trainer.model.losses.loss import Losses
from onward.trainer.model.losses.loss_file import load_loss
from onward.trainer.model.losses.loss_formulas import FORMULAS as TORCH_FORMULAS
from onward.trainer.model.losses.loss_formulas import LossInputs
from onward.trainer.onnx_graph.files.loss_files import label_dims, read_loss_file
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import named_weights
from tests.trainer.model.test_loss_formulas import CASES, IMAGE, MASK, SCORES, YES

Array = np.ndarray[Any, np.dtype[Any]]
LOSS_CASES = {name: case for name, case in CASES.items() if not name.startswith("ctc")}
ELSEWHERE = {"mse", "l1", "output", "file"}
"""Losses that are tested in test_files.py, or below."""


def run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, dict(feeds)), strict=True))


def scaled(outputs: Sequence[Tensor], *, opset: int = 20, free: int = 0) -> onnx.ModelProto:
    """Inputs x0, x1, ... [batch, ...] x a weight for each element of a row -> outputs a, b, c.

    free: the first axis of a row that is dynamic, if any; the last is not, and only it has weights then.
    """
    g = GraphWriter("scaled", seed=0, opset=opset)
    for number, (name, output) in enumerate(zip("abc", outputs, strict=False)):
        row: list[int | str] = list(output.shape[1:])
        if free:
            row[free - 1 : -1] = [f"d{axis}" for axis in range(free, output.ndim - 1)]
        weight = np.float32(1) + g.normal(0.2, *output.shape[-1 if free else 1 :])
        g.op("Mul", g.input(f"x{number}", ("batch", *row)), g.weight(f"w{number}", weight), outputs=name)
        g.output(name, ("batch", *row))
    return g.model()


def config(case: str, **settings: Any) -> LossConfig:
    outputs = CASES[case].outputs
    names = "a" if isinstance(outputs, Tensor) else ["a", "b", "c"][: len(outputs)]
    own = {"name": case.partition(",")[0], "ignore_index": -100, "output": names}
    own |= {"class_axis": 1} if outputs is IMAGE else {}
    return LossConfig.model_validate(own | CASES[case].settings | settings)


def assert_files_compute(
    model: onnx.ModelProto,
    losses: Sequence[LossConfig],
    outputs: Sequence[Tensor],
    labels: Sequence[Tensor | None],
    *,
    gradients: bool = True,
) -> None:
    """model_with_loss, eval and training give the losses of trainer/model/losses, training also torch's gradients."""
    module, names = to_module(model, fuse=False), loss_names(model, losses)
    feeds = {f"x{number}": output.numpy() for number, output in enumerate(outputs)}
    feeds |= {name: own.numpy() for name, own in zip(names.labels, labels, strict=True) if own is not None}
    size, each = len(outputs[0]), Losses(losses, module.output_names)
    sums = each(module(*outputs), labels, size)
    counts = [float(loss.count(own, size)) for loss, own in zip(each.each, labels, strict=True)]
    means = [total / max(count, 1e-30) for total, count in zip(sums, counts, strict=True)]
    loss = each.weighted(means)
    weights = named_weights(module)
    files = {
        "with loss": model_with_loss(model, losses, names=names),
        "evaluation": evaluation_model(model, losses, names=names, weights=weights, copies={}).model,
    }
    found = {name: run(file, feeds) for name, file in files.items()}
    if gradients:
        loss.backward()
        file = training_model(to_module(model, fuse=False), model, losses, names=names).model
        found["training"] = run(file, feeds | {name: weight.detach().numpy() for name, weight in weights.items()})
    expected = (
        {names.loss: loss}
        if len(names.outputs) == 1
        else {names.loss: loss, **dict(zip(names.means, means, strict=False))}
    )
    for name, values in found.items():
        for output, value in expected.items():
            assert values[output] == pytest.approx(float(value.detach()), rel=1e-5, abs=1e-6), (name, output)
            assert values[output].dtype == np.float32
    for name, weight in weights.items() if gradients else ():
        gradient = found["training"][gradient_of(name)]
        wanted = np.zeros_like(gradient) if weight.grad is None else weight.grad.numpy()
        np.testing.assert_allclose(gradient, wanted, rtol=2e-4, atol=1e-6, err_msg=name)


def listed(outputs: Tensor | list[Tensor]) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else outputs


def of_case(name: str, *, opset: int, gradients: bool) -> None:
    outputs, labels = listed(LOSS_CASES[name].outputs), LOSS_CASES[name].labels
    assert_files_compute(scaled(outputs, opset=opset), [config(name)], outputs, [labels], gradients=gradients)


def test_every_loss_without_a_reason_why_not_has_an_onnx_form_and_a_case_here() -> None:
    cases = {*(case.partition(",")[0] for case in LOSS_CASES), *ELSEWHERE}
    written = {name for name, rule in LOSS_RULES.items() if not rule.no_onnx} - {"teacher"}
    assert set(FORMULAS) == written == cases - {"teacher"}


def test_every_loss_has_a_rule_and_a_formula() -> None:
    assert set(LOSS_RULES) == set(get_args(LossName)) == {*TORCH_FORMULAS, *FAMILIES, "file", "teacher"}


@pytest.mark.parametrize("case", LOSS_CASES)
def test_a_loss_in_the_files_has_the_value_of_training(case: str) -> None:
    of_case(case, opset=13, gradients=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", LOSS_CASES)
def test_the_training_file_has_the_gradients_of_torch(case: str) -> None:
    of_case(case, opset=20, gradients=True)


def several() -> tuple[list[LossConfig], list[Tensor], list[Tensor | None]]:
    """Two losses of an image, one of numbers, and one without labels, each with its weight."""
    losses = [
        config("cross_entropy, smoothing", weight=2.0),
        config("dice", weight=0.5),
        config("huber", output="b", weight=3.0),
        config("info_nce", output=["b", "c"]),
    ]
    rows = SCORES[:2], SCORES[2:4]
    return losses, [IMAGE, *rows], [MASK, MASK, rows[1], None]


def test_several_losses_are_added_up_with_their_weights_and_each_has_an_output() -> None:
    losses, outputs, labels = several()
    model = scaled(outputs, opset=13)
    names = loss_names(model, losses)
    assert names.labels == ("labels_a/cross_entropy", "labels_a/dice", "labels_b", "")
    assert names.outputs == ("loss", "loss_a/cross_entropy", "loss_a/dice", "loss_b", "loss_info_nce")
    assert_files_compute(model, losses, outputs, labels, gradients=False)
    evaluation = evaluation_model(model, losses, names=names, weights=[], copies={})
    assert (evaluation.counts, evaluation.corrects) == (("count", "", "", ""), ("correct", "", "", ""))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gradients_of_several_losses_are_added_up() -> None:
    losses, outputs, labels = several()
    assert_files_compute(scaled(outputs), losses, outputs, labels)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sizes_that_only_the_data_knows_stay_dynamic() -> None:
    both = [config("cross_entropy, smoothing"), config("dice", weight=0.5)]
    assert_files_compute(scaled([IMAGE], free=2), both, [IMAGE], [MASK, MASK])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_class_of_dice_is_a_sigmoid_in_the_files() -> None:
    assert_files_compute(scaled([IMAGE[:, :1]]), [config("dice")], [IMAGE[:, :1]], [(MASK > 0).long()])


def test_the_number_of_classes_may_be_known_only_when_the_graph_runs() -> None:
    for image, mask in ((IMAGE, MASK), (IMAGE[:, :1], (MASK > 0).long())):
        model = scaled([image], free=1)
        assert_files_compute(model, [config("dice")], [image], [mask], gradients=False)
    for case in ("cross_entropy, smoothing", "cross_entropy, weights and smoothing"):
        assert_files_compute(scaled([IMAGE], free=1), [config(case)], [IMAGE], [MASK], gradients=False)


def test_the_weight_of_a_single_loss_is_in_the_loss_and_not_in_its_mean() -> None:
    losses = [config("huber", weight=0.25)]
    model = scaled([SCORES])
    assert loss_names(model, losses).outputs == ("loss", "loss_mean")
    assert_files_compute(model, losses, [SCORES], [YES], gradients=False)


def test_without_a_target_that_counts_the_loss_is_zero() -> None:
    none = torch.full((6,), -100)
    of_no_weight = torch.full((6,), 4)  # its class weight is 0
    for case, labels in (
        ("cross_entropy, weights", none),
        ("cross_entropy, weights", of_no_weight),
        ("cross_entropy, smoothing", none),
    ):
        loss = config(case, class_axis=None)
        model = scaled([SCORES])
        names = loss_names(model, [loss])
        file = model_with_loss(model, [loss], names=names)
        assert run(file, {"x0": SCORES.numpy(), "labels": labels.numpy()})["loss"] == 0.0


@pytest.mark.parametrize("soft", [False, True])
def test_the_accuracy_of_probabilities_is_that_of_their_greatest_class(soft: bool) -> None:
    case = CASES["cross_entropy, probabilities" if soft else "cross_entropy, weights"]
    loss, model = config("cross_entropy, probabilities" if soft else "cross_entropy, weights"), scaled([SCORES])
    file = evaluation_model(model, [loss], names=loss_names(model, [loss]), weights=[], copies={})
    assert case.labels is not None
    found = run(file.model, {"x0": SCORES.numpy(), "labels": case.labels.numpy()})
    classes = case.labels.argmax(1) if soft else case.labels
    right = (torch.from_numpy(found["a"]).argmax(1) == classes).sum()
    assert (found["count"], found["correct"]) == (6, int(right))


# -- losses of files


def loss_file(folder: Path, *, opset: int, rows: bool = True) -> LossConfig:
    """Squared differences x a weight for each column, as a loss for each row or as their mean."""
    g = GraphWriter("squares", seed=0, opset=opset)
    difference = g.op("Sub", g.input("output", ("n", "columns")), g.input("labels", ("n", "columns")))
    squares = g.op("Mul", g.op("Mul", difference, difference), g.weight("w", np.float32([1, 2, 3, 4, 5])))
    if rows:
        axes = {"axes": [1]} if opset < 18 else {}
        given = [g.weight("axes", [1])] if opset >= 18 else []
        g.op("ReduceMean", squares, *given, keepdims=0, outputs="loss", **axes)
        g.output("loss", ("n",))
    else:
        g.op("ReduceMean", squares, keepdims=0, outputs="loss")
        g.output("loss", ())
    path = folder / f"squares-{opset}-{rows}.onnx"
    onnx.save(g.model(), path)
    return LossConfig.model_validate({"name": "file", "file": str(path), "ignore_index": -100, "output": "a"})


def test_the_nodes_of_a_loss_file_are_appended_in_the_opset_of_the_model(tmp_path: Path) -> None:
    for opset, own, rows in ((20, 20, True), (20, 17, True), (17, 17, False), (17, 20, False), (20, 13, True)):
        loss = loss_file(tmp_path, opset=own, rows=rows)
        model = scaled([SCORES], opset=opset)
        assert_files_compute(model, [loss], [SCORES], [YES], gradients=False)
        appended = model_with_loss(model, [loss], names=loss_names(model, [loss]))
        assert [entry.version for entry in appended.opset_import] == [opset]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gradients_of_loss_files_are_those_of_torch(tmp_path: Path) -> None:
    losses = [loss_file(tmp_path, opset=17), loss_file(tmp_path, opset=20, rows=False)]
    for loss in losses:
        assert_files_compute(scaled([SCORES]), [loss], [SCORES], [YES])
    assert_files_compute(scaled([SCORES]), [*losses, config("focal", weight=0.5)], [SCORES], [YES, YES, YES])


def test_a_run_whose_loss_has_no_onnx_form_is_not_written(tmp_path: Path) -> None:
    sections = {"model": {"path": "m.onnx"}, "data": {"source": "x"}, "train": {"num_steps": 1}}
    own = build_config({**sections, "loss": {"name": "ctc"}})
    with pytest.raises(ExportRefused, match=r"no ONNX form of loss.name 'ctc': ONNX has no operator for it"):
        write_artifacts(tmp_path, scaled([SCORES]), own, base=tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_loss_file_may_choose_elements_by_their_values(tmp_path: Path) -> None:
    g = GraphWriter("chosen", seed=0, opset=20)
    x, y = (g.op("Reshape", g.input(name, ("n", 5)), g.weight("flat", [-1])) for name in ("output", "labels"))
    chosen = g.op("Compress", x, g.op("Greater", y, g.weight("half", 0.5)), axis=0)
    g.op("ReduceMean", chosen, keepdims=0, outputs="loss")
    g.output("loss", ())
    onnx.save(g.model(), tmp_path / "chosen.onnx")
    loss = LossConfig.model_validate({"name": "file", "file": str(tmp_path / "chosen.onnx"), "ignore_index": -100})
    assert_files_compute(scaled([SCORES]), [loss], [SCORES], [YES])


def test_no_other_loss_is_recorded_in_place_of_one_that_fails(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def broken(output, labels):\n    return output @ labels\n")
    loss = load_loss(f"{tmp_path}/mine.py:broken")

    def recorded(output: Tensor, labels: Tensor) -> Tensor:
        return loss(LossInputs(config("focal"), [output], labels, 6))

    with pytest.raises(ConfigError, match=r"mine.py:broken failed"):
        make_fx(recorded, tracing_mode="symbolic")(SCORES, YES)


def test_a_file_that_is_trained_on_may_have_a_loss_of_onward_already(tmp_path: Path) -> None:
    loss, model = loss_file(tmp_path, opset=20), scaled([SCORES])
    once = model_with_loss(model, [loss], names=loss_names(model, [loss]))
    names = loss_names(once, [loss])
    assert (names.loss, names.labels) == ("loss_2", ("labels_2",))
    values = run(
        model_with_loss(once, [loss], names=names),
        {"x0": SCORES.numpy(), "labels": YES.numpy(), "labels_2": YES.numpy()},
    )
    assert values["loss"] == values["loss_2"] > 0


def refused_file(folder: Path, opset: int, operator: str) -> Path:
    g = GraphWriter("refused", seed=0, opset=opset)
    x, y = g.input("output", ("n", 5)), g.input("labels", ("m", 5))
    g.op("ReduceMean", g.op(operator, x) if operator == "Gelu" else g.op("Sub", x, y), keepdims=0, outputs="loss")
    g.output("loss", ())
    path = folder / f"{operator}.onnx"
    onnx.save(g.model(), path)
    return path


def test_what_is_wrong_with_a_loss_file_is_said_with_opset_and_operators(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"has opset 20, and opset 17 of the model .* of Gelu, .*with opset 17"):
        read_loss_file(refused_file(tmp_path, 20, "Gelu"), 17)
    onnx.save(scaled([SCORES]), tmp_path / "one.onnx")
    with pytest.raises(UnsupportedModel, match=r"has 1 inputs and 1 outputs; it must have two inputs"):
        read_loss_file(tmp_path / "one.onnx", 20)
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(UnsupportedModel, match=r"text.onnx cannot be read"):
        read_loss_file(tmp_path / "text.onnx", 20)


def test_the_shape_of_labels_of_a_loss_file_follows_the_names_of_its_dimensions(tmp_path: Path) -> None:
    path = tmp_path / "named.onnx"
    for labels, expected in (
        (("n",), [None]),
        (("anything",), [None]),
        (("n", "c"), [None, 7]),
        (("n", 2), [None, 2]),
        ((None, None), [None, 7]),
    ):
        graph = onnx.helper.make_graph(
            [],
            "loss",
            [
                onnx.helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, ("n", "c")),
                onnx.helper.make_tensor_value_info("labels", onnx.TensorProto.FLOAT, labels),
            ],
            [],
        )
        onnx.save(onnx.helper.make_model(graph), path)
        assert label_dims(path, [None, 7]) == expected
    graph.input[1].type.tensor_type.shape.dim[1].dim_param = "other"
    onnx.save(onnx.helper.make_model(graph), path)
    with pytest.raises(UnsupportedModel, match=r"length of axis 1 of its input 'labels' is not known; declare it"):
        label_dims(path, [None, 7])
