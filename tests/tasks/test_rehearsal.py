"""configure rehearses: what would fail after sharding and launching is refused before, with nothing written."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx import numpy_helper

from onward.infra.job import forks
from onward.tasks.checks import rehearsing, subprocesses
from onward.tasks.configure import configure
from onward.trainer.config.loading import ENTRIES, build_config
from onward.trainer.config.losses import LossConfig
from onward.trainer.config.run_config import SECTIONS, RunConfig
from onward.trainer.config.sections.metrics import MetricConfig
from onward.trainer.errors import ConfigError, DataError, OnwardError, RuntimeUnavailable
from onward.trainer.model.compile import why_compiled
from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.rehearsal.checks import _time
from onward.trainer.rehearsal.findings import Findings
from onward.trainer.run.directory import RunDir, onward_home, read_config
from onward.trainer.run.records import CompileTrial, Rehearsal, RehearsedBatch, read_record
from tests.support import runs
from tests.support.graphs import tiny_conv_net, tiny_transformer
from tests.support.images import write_classes
from tests.support.packed import matmul_nbits
from tests.support.runs import tiny_images

pytestmark = pytest.mark.usefixtures("home", "forked")
Configured = Callable[..., Rehearsal]


@pytest.fixture
def configured(tmp_path: Path) -> Configured:
    """The real task `configure` on a model and its data; returns the rehearsal's record."""

    def begin(model: onnx.ModelProto, columns: dict[str, Any], /, **sections: dict[str, Any]) -> Rehearsal:
        onnx.save_model(model, tmp_path / "model.onnx")
        np.savez(tmp_path / "data.npz", **columns)
        given: dict[str, dict[str, Any]] = {
            "model": {"path": tmp_path / "model.onnx"},
            "data": {"source": str(tmp_path / "data.npz")},
            "train": {"global_batch_size": 8} | ({} if "num_epochs" in sections.get("train", {}) else {"num_steps": 4}),
            "launch": {"device": "cpu"},
        }
        settings = {
            name: SECTIONS[name].model_validate(given.get(name, {}) | sections.get(name, {}))
            for name in (given.keys() | sections.keys()) - set(ENTRIES)
        }
        run = RunDir(onward_home() / "runs" / "run")
        configure.fn(run, {"name": "rehearsed", **settings, **{name: sections.get(name, ()) for name in ENTRIES}})
        return read_record(run.rehearsal, Rehearsal)

    return begin


def refused(home: Path, configured: Configured, *arguments: Any, **sections: dict[str, Any]) -> tuple[str, ...]:
    """The problems for which `configure` refuses a run; nothing is left of it."""
    with pytest.raises(OnwardError) as refusal:
        configured(*arguments, **sections)
    assert refusal.value.exit_code == 2
    assert not home.exists(), "something was written"
    assert isinstance(refusal.value, ConfigError)
    return refusal.value.problems


def test_a_run_is_rehearsed_at_its_micro_batch_and_at_the_ends_of_its_data(configured: Configured) -> None:
    # 22 of 25 rows are trained on: 2 steps of 8 and one of 6, which 2 replicas divide into 3 and 3
    columns = tiny_images(25)
    found = configured(
        tiny_conv_net(), columns, train={"num_epochs": 1}, parallel={"data": 2}, data={"evaluation_fraction": 0.12}
    )
    assert [(each.what, each.rows) for each in found.batches] == [
        ("training", 4),
        ("training", 3),
        ("evaluation", 2),
        ("evaluation", 1),
    ]
    assert all(np.isfinite(each.loss) for each in found.batches)
    assert (found.trained, found.without_gradient, found.not_rehearsed) == (6, (), ())
    assert found.parity < 1e-5
    assert found.judged_by == "onnxruntime"
    assert [warning.key for warning in found.warnings] == ["folded_batch_norm"]


def test_patterns_of_no_weight_and_a_rule_of_no_weight_are_refused(home: Path, configured: Configured) -> None:
    unknown = {"name": "muon", "weights": [{"pattern": "haed.*", "alpha": 0.5}]}
    (pattern,) = refused(home, configured, tiny_conv_net(), tiny_images(25), optimizer=unknown)  # read off the file
    assert pattern.startswith("optimizer.weights: no weight of the model matches 'haed.*'; there is features.3.bias,")
    (rule,) = refused(home, configured, tiny_conv_net(), tiny_images(25), optimizer={"name": "muon"})
    assert rule.startswith("optimizer.name 'muon': no trained weight is a matrix of a hidden layer; use adamw")


def test_a_padding_micro_batch_is_rehearsed(configured: Configured) -> None:
    # 17 training rows: the last step has one row for 2 replicas
    found = configured(
        tiny_conv_net(),
        tiny_images(19),
        train={"num_epochs": 1},
        parallel={"data": 2},
        data={"evaluation_fraction": 0.1},
    )
    assert ("padding", 1) in [(each.what, each.rows) for each in found.batches]


def test_training_batches_are_rehearsed_augmented_and_mixed_and_evaluation_is_not(
    configured: Configured, home: Path, tmp_path: Path
) -> None:
    source = str(write_classes(tmp_path / "images", ("cat", "dog", "eel"), 8))
    losses = []
    for place, augment in enumerate(({}, {"flip": 1.0}, {"mixup": 1.0, "cutmix": 1.0})):
        image = {"augment": augment, "workers": 1}
        found = configured(tiny_conv_net(image_size=16), {}, data={"source": source, "image": image})
        assert (found.not_rehearsed, found.parity < 1e-5) == ((), True), place
        losses.append({each.what: each.loss for each in found.batches})
        shutil.rmtree(home)
    assert len({each["training"] for each in losses}) == 3
    assert len({each["evaluation"] for each in losses}) == 1


# -- what is refused


def test_labels_that_cannot_be_mixed_are_refused_before_anything_is_launched(
    home: Path, configured: Configured, tmp_path: Path
) -> None:
    write_classes(tmp_path / "images", ("cat",), 20)
    rows = [f"images/cat/{at:03d}.jpg,{-100 if at == 3 else at % 3}" for at in range(20)]
    (tmp_path / "table.csv").write_text("\n".join(["image,label", *rows]))
    data = {"source": str(tmp_path / "table.csv"), "image": {"augment": {"mixup": 0.2}}}
    with pytest.raises(DataError, match=r"label -100 in column 'label' cannot be mixed: the classes are 0\.\.3"):
        configured(tiny_conv_net(image_size=16), {}, data=data)
    assert not home.exists(), "something was written"


def test_a_loss_that_does_not_fit_the_output_is_refused_with_the_shapes(home: Path, configured: Configured) -> None:
    text = """
        <ir_version: 10, opset_import: ["" : 17]>
        mean (float[N, 3] x) => (float[2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 7}> {
            scores = MatMul(x, w)
            y = ReduceMean <axes = [0], keepdims = 0> (scores)
        }"""
    columns = {"x": np.ones((20, 3), np.float32), "label": np.arange(20) % 2}
    problems = refused(home, configured, onnx.parser.parse_model(text), columns)
    assert (
        "the loss cannot be computed: output 'y' is [2] and the labels are [8]: the output has 2 rows for a batch of 8"
        in problems[0]
    )
    assert not any("runs at none of the sizes" in each or "model.start" in each for each in problems)


def test_a_last_micro_batch_that_does_not_run_is_refused(home: Path, configured: Configured, tmp_path: Path) -> None:
    # 17 training rows: two steps of 8, and one of 1
    sections = {"model": own_operator(tmp_path, TWO_ROWS, reference="x"), "data": {"evaluation_fraction": 0.15}}
    (problem,) = refused(home, configured, OWN, table(20), train={"num_epochs": 1}, **sections)
    assert "the last micro-batch of the training, of 1 row, does not run: NameError" in problem
    assert "at the node that computes 'stepped'" in problem
    assert "a train.global_batch_size that divides the 17 training rows" in problem
    found = configured(OWN, table(20), train={"num_epochs": 1, "global_batch_size": 17}, **sections)
    assert [(each.what, each.rows) for each in found.batches] == [("training", 17), ("evaluation", 3)]


def test_an_operator_without_a_gradient_is_refused_with_the_node(
    home: Path, configured: Configured, tmp_path: Path
) -> None:
    (problem,) = refused(home, configured, OWN, table(), model=own_operator(tmp_path))
    assert "a micro-batch of 8 rows does not run: " in problem
    assert "the derivative for 'igamma: input' is not implemented" in problem
    assert "at the node that computes 'stepped'" in problem
    assert "the graph runs forward alone" in problem


def test_a_wrong_import_is_refused_before_it_is_trained(home: Path, configured: Configured, tmp_path: Path) -> None:
    wrong = own_operator(tmp_path, "2 * x", reference="x")
    (problem,) = refused(home, configured, OWN, table(), model=wrong)
    assert "the untrained file: output 'stepped'" in problem
    assert "onnx.reference is 0.5 off the torch module, above export.tolerance 0.001" in problem


def test_a_process_that_crashes_is_reported(configured: Configured, home: Path, tmp_path: Path) -> None:
    crashes = own_operator(tmp_path, "__import__('os').abort()")
    with pytest.raises(RuntimeUnavailable, match=r"`python -m onward.trainer rehearse` ended with signal 6"):
        configured(OWN, table(), model=crashes)
    assert not home.exists()


def test_a_loss_without_a_gradient_is_refused(home: Path, configured: Configured) -> None:
    rounded = parsed(
        """
        rounded (float[batch, 4] x) => (float[batch, 3] scores) { y = MatMul(x, w) scores = Round(y) }""",
        w=normal(4, 3),
    )
    (problem,) = refused(home, configured, rounded, table())
    assert "nothing would be learnt: the loss of the first 8 rows is" in problem
    assert "its gradient is zero for each of the 1 trained weights (w). The loss reads 'scores'" in problem


def test_a_file_without_weights_is_refused(home: Path, configured: Configured) -> None:
    empty = parsed("empty (float[batch, 4] x) => (float[batch, 4] y) { y = Relu(x) }")
    (problem,) = refused(home, configured, empty, table())
    assert "no stored tensor of the graph is a weight" in problem


def test_a_loss_that_is_not_finite_is_refused(home: Path, configured: Configured) -> None:
    logarithm = parsed("""
        logarithm (float[batch, 4] x) => (float[batch, 3] scores) { y = MatMul(x, w) scores = Log(y) }
        """, w=normal(4, 3))  # fmt: skip
    problems = refused(home, configured, logarithm, table())
    assert problems[0].startswith("before any training, the loss of the first 8 rows is nan and the gradients of 1 of")


def test_metrics_that_would_take_probabilities_for_logits_are_refused_of_a_loss_of_a_file(
    home: Path, configured: Configured, tmp_path: Path
) -> None:
    g = GraphWriter("probabilities", seed=0)
    scores = g.op("MatMul", g.input("x", ("batch", 4)), g.weight("w", g.normal(0.5, 4, 3)))
    g.op("Softmax", scores, outputs="p")
    g.output("p", ("batch", 3))
    (tmp_path / "own.py").write_text("def brier(p, t):\n    return (p - (t[:, None] == 1).float()).square().sum()\n")
    loss = {"name": "file", "file": f"{tmp_path / 'own.py'}:brier", "label": "label", "label_type": "int64"}
    columns = {"x": normal(20, 4, seed=1), "label": np.arange(20) % 3}

    def with_metrics(*names: str) -> dict[str, Any]:
        return {"loss": (LossConfig.model_validate(loss),), "metrics": tuple(MetricConfig(name=name) for name in names)}

    (problem,) = refused(home, configured, g.model(), columns, **with_metrics("accuracy", "f1", "auroc"))
    assert problem.startswith("metrics: auroc reads the output of loss.file as logits, but it holds probabilities")
    assert configured(g.model(), columns, **with_metrics("accuracy", "f1")).batches


def test_labels_that_are_no_classes_are_refused(home: Path, configured: Configured) -> None:
    # the output does not declare how many classes there are, so only running the graph shows it
    model = tiny_conv_net(num_classes=3)
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "classes"
    problems = refused(home, configured, model, tiny_images(25, classes=4))
    assert "labels 3 in rows" in problems[0]


def test_merged_weights_are_refused_until_they_are_accepted_or_untied(home: Path, configured: Configured) -> None:
    g = GraphWriter("merged")
    x, bias = g.input("x", ("batch", 4)), g.weight("bias", np.zeros(4, np.float32))
    for layer in "abc":
        x = g.op("Relu", g.op("Add", g.op("MatMul", x, g.weight(f"{layer}.w", normal(4, 4, seed=ord(layer)))), bias))
    g.output(x, ("batch", 4))
    model = g.model()
    (problem,) = refused(home, configured, model, table(classes=4))
    assert "1 weights are read by several layers" in problem
    assert 'set model.untie = ["bias"]' in problem
    assert 'model.accept = ["merged"]' in problem
    accepted = configured(model, table(classes=4), model={"accept": ("merged",)})
    assert [warning.key for warning in accepted.warnings if warning.changes_training] == ["merged"]


def _mostly_integers() -> onnx.ModelProto:
    """A product of integers that are scaled only afterwards, which cannot be trained, and a layer that can."""
    g = GraphWriter("integers")
    w = g.op("Cast", g.weight("w", np.arange(-32, 32, dtype=np.int8).reshape(4, 16)), to=onnx.TensorProto.FLOAT)
    x = g.op("Mul", g.op("MatMul", g.input("x", ("batch", 4)), w), g.weight("s", np.full(16, 0.01, np.float32)))
    g.output(g.op("MatMul", g.op("Relu", x), g.weight("head", normal(16, 3, seed=1))), ("batch", 3))
    return g.model()


def test_a_model_whose_greater_part_cannot_be_trained_is_refused_until_it_is_accepted(
    home: Path, configured: Configured
) -> None:
    model = _mostly_integers()
    (problem,) = refused(home, configured, model, table(classes=3))
    assert problem.startswith(
        "64 of the 128 numbers of weights stay frozen, because of how the file stores them: w (64: stored as integers; "
    )
    assert problem.endswith('or, to train it so, set model.accept = ["mostly_frozen"]')
    found = configured(model, table(classes=3), model={"accept": ("mostly_frozen",)})
    assert found.numbers == (64, 128)
    assert "2 of 2 weights with a gradient, trained 64 of 128 numbers; onnxruntime" in found.summary


def test_a_part_that_the_settings_leave_out_needs_no_consent(configured: Configured) -> None:
    found = configured(_mostly_integers(), table(classes=3), model={"train": ("head",)})
    assert found.numbers == (48, 128)
    assert not [warning.key for warning in found.warnings if warning.changes_training]


def test_everything_that_is_wrong_is_refused_at_once(home: Path, configured: Configured, tmp_path: Path) -> None:
    problems = refused(
        home,
        configured,
        OWN,
        table(20),
        model=own_operator(tmp_path, TWO_ROWS),
        train={"num_epochs": 1},
        data={"evaluation_fraction": 0.15},
        parallel={"tensor": 2},
    )
    assert len(problems) == 3
    assert "nothing of this graph can be divided over parallel.tensor = 2" in problems[0]
    assert "the untrained file: output 'stepped'" in problems[1]
    assert "the last micro-batch of the training, of 1 row, does not run: NameError" in problems[2]


# -- files of fixed batch


def test_a_graph_that_mixes_its_fixed_batch_is_refused_at_other_sizes_and_at_an_incomplete_end(
    home: Path, configured: Configured
) -> None:
    (problem,) = refused(home, configured, MIXED, table())
    assert "the file is trained 4 rows at a time: the results of a row depend on the other rows" in problem
    assert "= 8 rows; set train.gradient_accumulation_steps = 2" in problem
    by_four = {"global_batch_size": 4, "num_epochs": 1}
    (problem,) = refused(home, configured, MIXED, table(), train=by_four)  # of 20 rows 18 are trained on
    assert "but a run of 18 samples ends with 2" in problem


def test_a_graph_that_mixes_its_fixed_batch_is_rehearsed_at_that_size(configured: Configured) -> None:
    halves = {"global_batch_size": 8, "gradient_accumulation_steps": 2, "num_steps": 2}
    found = configured(MIXED, table(48), train=halves)
    assert [(each.what, each.rows) for each in found.batches] == [("training", 4), ("evaluation", 4)]
    assert found.parity < 1e-5
    assert (found.fixed_batch, read_config(RunDir(onward_home() / "runs" / "run")).model.fixed_batch) == ("joint",) * 2
    assert configured(MIXED, table(48), train=halves) == found  # a run that has begun keeps what was found


# -- what is left out, and named


def test_without_a_rehearsal_the_record_says_so(configured: Configured) -> None:
    found = configured(tiny_conv_net(), tiny_images(25), launch={"device": "cpu", "rehearsal": "off"})
    assert (found.batches, found.not_rehearsed) == ((), ("everything: launch.rehearsal is 'off'",))


def test_what_is_not_reached_in_time_is_named(configured: Configured, tmp_path: Path) -> None:
    model = own_operator(tmp_path, SLOW, reference="x")
    with (tmp_path / "own.py").open("a") as file:  # which the process of the rehearsal imports before its time begins
        file.write("import onward.trainer.rehearsal.rehearse as rehearse\nrehearse.MOST_S = 1.0\n")
    found = configured(OWN, table(), model=model)
    assert [each.what for each in found.batches] == ["training"]
    (left,) = found.not_rehearsed
    assert left == (
        "an evaluation batch of 2 rows, the units of the labels, the comparison with onnxruntime, the guard: "
        "the time of the rehearsal, 1 s, was over"
    )


def test_the_precision_of_gpus_is_named_and_that_of_cpus_is_used(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.tasks.configure.machine_problems", lambda sections: [])  # it may have no GPU
    arguments = tiny_conv_net(), tiny_images(25)
    on_gpu = configured(*arguments, launch={"device": "cuda"}, precision={"compute": "fp16"})
    assert on_gpu.not_rehearsed == ("precision.compute 'fp16', that of GPUs: the CPU computed in fp32",)
    for run in onward_home().glob("runs/*/*.json"):
        run.unlink()
    on_cpu = configured(*arguments, precision={"compute": "bf16"})
    assert on_cpu.not_rehearsed == ()
    assert on_cpu.batches[0].loss == pytest.approx(on_gpu.batches[0].loss, rel=0.02)
    assert on_cpu.batches[0].loss != on_gpu.batches[0].loss


def test_the_precision_of_a_cpu_is_chosen_by_the_time_of_a_micro_batch_and_kept(configured: Configured) -> None:
    arguments = tiny_conv_net(), tiny_images(25)
    found = configured(*arguments, precision={"compute": "auto"})
    assert found.compute in ("fp32", "bf16")
    assert found.not_rehearsed == ()
    assert f"precision.compute 'auto' is {found.compute}" in found.summary
    run = RunDir(onward_home() / "runs" / "run")
    assert read_config(run).precision.compute == found.compute
    configured(*arguments, precision={"compute": "auto"})  # as `onward resume` does
    assert read_config(run).precision.compute == found.compute


def test_without_a_time_in_bf16_the_precision_is_not_chosen_and_the_run_is_not_refused() -> None:
    findings, config = (
        Findings(),
        build_config(
            {
                "model": {"path": "m.onnx"},
                "data": {"source": "d.npz"},
                "train": {"num_steps": 1},
                "precision": {"compute": "auto"},
            }
        ),
    )
    _time(None, lambda: pytest.fail("no micro-batch has run"), config.precision, findings)  # type: ignore[arg-type]
    findings.batches.append(RehearsedBatch(what="training", rows=1, loss=1.0, elapsed_s=0.1))

    def unsupported() -> Any:
        raise RuntimeError("not implemented for 'BFloat16'")

    _time(None, unsupported, config.precision, findings)  # type: ignore[arg-type]
    assert findings.compute == ""
    assert findings.not_rehearsed == ["the time in fp32 and bf16: RuntimeError: not implemented for 'BFloat16'"]


def test_compiling_a_short_run_is_not_tried_and_the_choice_is_said_and_kept(configured: Configured) -> None:
    arguments, auto = (tiny_conv_net(), tiny_images(25)), {"compile": "auto"}
    found = configured(*arguments, graph=auto)
    assert found.compile is not None
    assert not found.compile.compiles
    assert re.match(r"the passes of 4 steps take about \S+ s, of which compiling could save some", found.compile.text)
    assert found.not_rehearsed == ()
    assert found.summary.endswith("graph.compile 'auto' is false")
    run = RunDir(onward_home() / "runs" / "run")
    assert read_config(run).graph.compile is False
    assert why_compiled(run).startswith("graph.compile 'auto' is false: the passes of 4 steps")
    configured(*arguments, graph=auto)  # as `onward resume` does
    with pytest.raises(ConfigError, match=r"graph\.compile was False when the run began, now True"):
        configured(*arguments, graph={"compile": True})


def test_without_a_rehearsal_nothing_is_compiled(configured: Configured) -> None:
    found = configured(tiny_conv_net(), tiny_images(25), graph={"compile": "auto"}, launch={"rehearsal": "off"})
    assert found.compile is not None
    assert (found.compile.compiles, found.compile.text) == (
        False,
        "nothing was measured, since launch.rehearsal is 'off'",
    )
    assert read_config(RunDir(onward_home() / "runs" / "run")).graph.compile is False


def test_a_choice_to_compile_is_that_of_the_run_and_stays_when_it_is_resumed(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = CompileTrial(compiles=True, text="it pays", steps=4, break_even=2)
    asked = []

    def rehearsed(given: rehearsing.Preparation) -> tuple[RunConfig, Rehearsal]:
        asked.append(given.config.graph.compile)
        found = Rehearsal(compile=chosen)
        return rehearsing._with_choices(given.config, found), found

    monkeypatch.setattr(rehearsing.Preparation, "rehearse", rehearsed)
    arguments, auto = (tiny_conv_net(), tiny_images(25)), {"compile": "auto"}
    for _ in range(2):
        configured(*arguments, graph=auto)
    run = RunDir(onward_home() / "runs" / "run")
    assert asked == ["auto"]
    assert read_config(run).graph.compile is True
    with pytest.raises(ConfigError, match=r"graph\.compile was True when the run began, now 'dynamic'"):
        configured(*arguments, graph={"compile": "dynamic"})


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(1800)
def test_a_run_takes_the_code_of_its_trial_and_killed_and_resumed_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))

    def make(name: str, **graph: Any) -> RunDir:
        return runs.make_run(
            tmp_path / name,
            tiny_transformer(dropout=0.2),
            runs.tiny_text(80),
            train={"global_batch_size": 8, "num_steps": 10, "evaluation_period": 5, "seed": 5},
            checkpoint={"period": 4},
            graph=graph,
            launch={"heartbeat_timeout_s": 300},
        )

    given = read_config(make("given", compile="auto"))
    # so many steps that compiling is tried; each is a few milliseconds
    train = given.train.model_copy(update={"num_steps": 10_000_000})
    chosen, found = rehearsing.Preparation(given.model_copy(update={"train": train})).rehearse()
    assert found.compile is not None
    assert found.compile.compile_s > 0 < found.compile.eager_s, found.compile.text
    assert chosen.graph.compile is found.compile.compiles

    def kept() -> set[Path]:
        return {path for path in (tmp_path / "code" / "fxgraph").rglob("*") if path.is_file()}

    code, undisturbed, killed = kept(), make("undisturbed", compile=True), make("killed", compile=True)
    assert code
    runs.train_run(undisturbed, timeout_s=600)
    assert kept() == code, "the ranks have compiled other graphs than the trial"
    runs.train_until(killed, ("scalars", 6), rank=0)
    runs.train_run(killed, timeout_s=600)
    runs.assert_equal_bits(runs.final_tensors(killed), runs.final_tensors(undisturbed))


def test_a_rehearsal_that_was_begun_ahead_is_taken_for_the_same_run_alone_and_ended_if_nothing_takes_it(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured(tiny_conv_net(), tiny_images(25))
    config = read_config(RunDir(onward_home() / "runs" / "run"))
    started = []

    def start(*words: str, **places: Any) -> Any:
        started.append(subprocesses.start_module(*words, **places))
        return started[-1]

    monkeypatch.setattr(rehearsing, "start_module", start)
    with rehearsing.begun_ahead(config):
        _, found = rehearsing.Preparation(config).rehearse()
    assert len(started) == 1
    assert found.trained == 6
    other = config.model_copy(update={"train": config.train.model_copy(update={"seed": 7})})
    with rehearsing.begun_ahead(other):
        rehearsing.Preparation(config).rehearse()
    assert len(started) == 3
    with pytest.raises(KeyboardInterrupt), rehearsing.begun_ahead(config):
        raise KeyboardInterrupt
    assert started[-1].returncode is not None, "it is ended"
    assert rehearsing._begun.get() is None


def test_a_run_that_has_begun_is_not_rehearsed_again(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = tiny_conv_net(), tiny_images(25)
    first = configured(*arguments)
    monkeypatch.setattr(forks, "python", lambda: ["/absent"])
    assert configured(*arguments) == first


def test_the_chosen_layout_is_rehearsed_in_the_process_that_chooses_it(configured: Configured) -> None:
    parallel = {"sizes": "auto", "memory_gib": 1.0}
    found = configured(tiny_conv_net(), tiny_images(25), parallel=parallel, launch={"num_ranks": 2, "device": "cpu"})
    chosen = read_config(RunDir(onward_home() / "runs" / "run"))
    assert chosen.world_size == 2
    assert found.batches[0].rows == chosen.micro_batch_size


# -- models and data


def parsed(text: str, **weights: Any) -> onnx.ModelProto:
    """A model in ONNX's text form, without its header."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20, "own" : 1]>\n{text}')
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    return model


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(0, 0.5, shape).astype(np.float32)


def table(rows: int = 20, *, classes: int = 3) -> dict[str, Any]:
    """Rows for an input `x` [batch, 4], and labels."""
    return {"x": 4 * normal(rows, 4, seed=1), "label": np.arange(rows) % classes}


OWN = parsed(
    """
    own (float[batch, 4] x) => (float[batch, 3] stepped) { y = MatMul(x, w) stepped = own.Step(y) }""",
    w=normal(4, 3),
)
MIXED = parsed("""
    mixed (float[4, 4] x) => (float[4, 3] y) { z = MatMul(x, w) y = Softmax<axis = 0>(z) }
    """, w=normal(4, 3))  # fmt: skip
REFERENCE = "gammainc(abs(x) + 1, 1.0)"
GAMMA = "torch.igamma(x.abs() + 1, torch.ones_like(x))"
OWN_OPERATOR = f"""
import time
import torch
from onnx.reference.op_run import OpRun
from onnx2torch.node_converters.registry import add_converter
from onnx2torch.utils.common import OperationConverterResult, onnx_mapping_from_node
from scipy.special import gammainc

class Module(torch.nn.Module):
    def forward(self, x):
        return {GAMMA}

@add_converter("Step", 1, domain="own")
def convert(node, graph):
    return OperationConverterResult(Module(), onnx_mapping_from_node(node))

class Step(OpRun):
    op_domain = "own"
    def _run(self, x):
        return ({REFERENCE}.astype(x.dtype),)
"""
"""An operator of the user's, which torch cannot differentiate: the incomplete gamma function."""


def own_operator(
    folder: Path, computes: str = GAMMA, *, reference: str = "gammainc(abs(x) + 1, 1.0)"
) -> dict[str, Any]:
    """Write the operator with another body; return the section that names it."""
    text = OWN_OPERATOR.replace(GAMMA, computes).replace(REFERENCE, reference)
    (folder / "own.py").write_text(text)
    return {"converters": (folder / "own.py",)}


TWO_ROWS = "x if not self.training or len(x) > 1 else at_least_two"
"""Fails in training on a single row."""
SLOW = "(time.sleep(0 if self.training or x.is_meta or len(x) == 1 else 60), x)[1]"
"""Takes a minute in evaluation, for more than one row."""


def scores_of_pixels(*dims: int | str) -> onnx.ModelProto:
    """`image` [batch, 5, 5, 5] -> `scores` of the same shape, which the file declares as `dims`."""
    g = GraphWriter("pixels", seed=0)
    g.op("Conv", g.input("image", ("batch", *dims)), g.weight("w", g.normal(0.5, 5, 5, 1, 1)), outputs="scores")
    g.output("scores", ("batch", *dims))
    return g.model()


MASKS = {
    "image": np.random.default_rng(0).standard_normal((40, 5, 5, 5)).astype(np.float32),
    "label": np.random.default_rng(1).integers(0, 5, (40, 5, 5)),
}


@pytest.mark.parametrize("dims", [(5, 5, 5), ("c", "h", "w")], ids=["fixed", "dynamic"])
def test_scores_whose_axis_of_classes_is_not_known_are_refused_with_the_axes_that_fit(
    home: Path, configured: Configured, dims: tuple[int | str, ...]
) -> None:
    """Trained over the last axis, its loss would be another number than torch's, and nothing would show it."""
    problems = refused(home, configured, scores_of_pixels(*dims), MASKS)
    assert "may be on axis 1, 2 or 3; say which: loss.class_axis = 1 or loss.class_axis = 2" in problems[0]


def channels_last(*dims: int | str) -> onnx.ModelProto:
    """`image` [batch, 3, h, w] -> `image` with its channels last and mixed, which the file declares as `dims`."""
    g = GraphWriter("last", seed=0)
    x = g.op("Transpose", g.input("image", ("batch", 3, "h", "w")), perm=[0, 2, 3, 1])
    g.op("MatMul", x, g.weight("w", g.normal(0.5, 3, 3)), outputs="mixed")
    g.output("mixed", ("batch", *dims))
    return g.model()


def patches() -> onnx.ModelProto:
    """`image` [batch, 1, h, w] -> the same, but as rows of 16 pixels: [batch x h x w / 16, 1, 4, 4]."""
    g = GraphWriter("patches", seed=0)
    x = g.op("Reshape", g.input("image", ("batch", 1, "h", "w")), g.weight("rows", np.array([-1, 16])))
    x = g.op("MatMul", x, g.weight("w", g.normal(0.5, 16, 16)))
    g.op("Reshape", x, g.weight("shape", np.array([-1, 1, 4, 4])), outputs="patches")
    g.output("patches", ("batch", 1, "h", "w"))
    return g.model()


def images(rows: int, *shape: int) -> Any:
    return np.random.default_rng(0).standard_normal((rows, *shape)).astype(np.float32)


REGRESSION: dict[str, dict[str, Any]] = {
    "model": {"loss": "mse", "train": ["w"]},
    "data": {"label": "target", "evaluation_fraction": 0.25},
}


@pytest.mark.parametrize("dims", [(8, 6, 3), ("h", "w", "c")], ids=["fixed", "dynamic"])
def test_labels_in_another_order_of_axes_than_the_output_are_refused_and_a_transpose_is_named(
    home: Path, configured: Configured, dims: tuple[int | str, ...]
) -> None:
    """Paired in memory order, they trained to the variance of the labels, and the run was exported as verified."""
    columns = {"image": images(40, 3, 8, 6), "target": images(40, 3, 8, 6)}
    (problem,) = refused(home, configured, channels_last(*dims), columns, **REGRESSION)
    if dims == (8, 6, 3):
        assert "must be [8, 6, 3] a sample to fit the output, but column 'target' is float32 [3, 8, 6]" in problem
    else:
        assert "output 'mixed' is [8, 8, 6, 3] and the labels are [8, 3, 8, 6]" in problem
    assert re.search(r"store them as numpy.transpose\((target|labels), \(0, 2, 3, 1\)\)$", problem)
    columns["target"] = columns["target"].transpose(0, 2, 3, 1)
    record = configured(channels_last(*dims), columns, **REGRESSION)
    assert record.batches[0].rows == 8


@pytest.mark.parametrize("size", [8, 6])
def test_an_output_whose_rows_are_not_those_of_the_batch_is_refused_and_no_size_of_batches_is_recommended(
    home: Path, configured: Configured, size: int
) -> None:
    """Images of 6 x 6 fill 16-pixel rows only in batches of 4 and 8, which once led to advice about the size."""
    columns = {"image": images(40, 1, size, size), "target": images(40, 1, size, size)}
    found = refused(home, configured, patches(), columns, **REGRESSION)
    rows = 8 * size * size // 16
    assert f"output 'patches' is [{rows}, 1, 4, 4] and the labels are [8, 1, {size}, {size}]" in found[0]
    assert f"the output has {rows} rows for a batch of 8" in found[0]
    assert "train.evaluation_batch_size" not in "".join(found)
    assert any("another size is no remedy" in problem for problem in found) == (size == 6), "2 x 6 x 6 is no rows of 16"


COUNTS = {
    "-len(labels)": "returned -1 for labels [1]; it must be 0 or more",
    "str(size)": "returned str for labels [1], not a number",
    "torch.ones(1, requires_grad=True).sum()": "returned a tensor with a gradient; count the labels, or detach it",
    "1": "'count' returned 1 for 8 rows, but 1 for the first of them and 1 for the other 7; it must be a sum over rows",
}


@pytest.mark.parametrize("returned", COUNTS)
def test_a_count_of_targets_that_is_none_is_refused(
    home: Path, configured: Configured, tmp_path: Path, returned: str
) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nimport torch.nn.functional as F\n\n"
        "def loss(output, labels):\n    return F.cross_entropy(output, labels, reduction='sum')\n\n"
        f"def count(labels, size):\n    return {returned}\n"
    )
    loss = {"file": f"{tmp_path}/mine.py:loss", "count": "count", "label_type": "int64"}
    problems = refused(home, configured, tiny_conv_net(), tiny_images(40), loss=loss)
    assert COUNTS[returned] in problems[0]


def test_a_loss_of_a_file_that_is_a_mean_is_refused(home: Path, configured: Configured, tmp_path: Path) -> None:
    """Divided by the number of rows once more, its gradients would be too small, and nothing would show it."""
    (tmp_path / "mine.py").write_text(
        "import torch.nn.functional as F\n\ndef mean(output, labels):\n    return F.cross_entropy(output, labels)\n"
    )
    loss = {"file": f"{tmp_path}/mine.py:mean", "label_type": "int64"}
    (problem,) = refused(home, configured, tiny_conv_net(), tiny_images(40), loss=loss)
    assert re.search(
        r"mine\.py:mean' is [\d.]+ for 8 rows, but [\d.]+ for the first of them and [\d.]+ for the", problem
    )
    assert problem.endswith("it seems to be a mean: return the sum, such as by reduction='sum'")


@pytest.mark.parametrize(("dims", "loss"), [((5, 5, 5), {"class_axis": 1}), ((5, "h", "w"), {})])
def test_the_axis_of_classes_is_given_or_the_one_length_that_the_file_fixes(
    configured: Configured, dims: tuple[int | str, ...], loss: dict[str, Any]
) -> None:
    rows = {name: np.repeat(values[:1], 40, 0) for name, values in MASKS.items()}
    found = configured(model := scores_of_pixels(*dims), rows, loss=loss)
    (weight,) = (torch.from_numpy(numpy_helper.to_array(tensor).copy()) for tensor in model.graph.initializer)
    image, mask = torch.from_numpy(MASKS["image"][:1]), torch.from_numpy(MASKS["label"][:1])
    expected = torch.nn.functional.cross_entropy(torch.nn.functional.conv2d(image, weight), mask)
    assert [each.loss for each in found.batches] == [pytest.approx(float(expected), rel=1e-5)] * len(found.batches)


def test_a_file_whose_kernels_round_is_rehearsed_and_the_rounding_is_said(configured: Configured) -> None:
    model, _ = matmul_nbits(columns=32, level=4, bias=True)
    rng = np.random.default_rng(0)
    columns = {"x": rng.standard_normal((25, 32)), "y": rng.standard_normal((25, 6))}
    columns = {name: value.astype(np.float32) for name, value in columns.items()}
    found = configured(
        model,
        columns,
        model={"loss": "mse", "accept": ["mostly_frozen"]},
        data={"label": "y", "evaluation_fraction": 0.2},
        train={"num_steps": 4},
    )
    assert found.trained == 1
    assert 1e-3 < found.parity < 0.05
    assert found.judged_by.startswith("onnxruntime, whose kernels round by 0.0")
    assert found.parity <= float(found.judged_by.removesuffix(",").rpartition(" ")[2]) + 2e-3
    assert f"{found.judged_by} differs by {found.parity:.2g}" in found.summary
