"""The command refuses a wrong configuration: message, exit status 2, within 3 s, without importing torch."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from onward.trainer.onnx_graph.node_builder import GraphWriter
from onward.trainer.run.outcomes.ending_kinds import EXIT_STATUSES
from tests.support.graphs import tiny_conv_net

CONFIG = """
[model]
path = "model.onnx"
[data]
source = "data.npz"
[train]
global_batch_size = 8
num_steps = 4
[parallel]
data = 2
"""

ONWARD = """
import sys
from onward.flows.cli import main
try:
    main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""
"""`onward`, with a last line on stderr that says whether torch was imported."""


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    """A directory with a model, data that fits it, and a valid configuration."""
    onnx.save_model(tiny_conv_net(num_classes=4), tmp_path / "model.onnx")
    images = np.zeros((20, 3, 8, 8), np.float32)
    np.savez(tmp_path / "data.npz", image=images, label=np.arange(20) % 4)
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


def run_refused(workshop: Path, *overrides: str, status: int = 2) -> tuple[list[str], list[str]]:
    """Run `onward run` on the workshop's configuration; return the problems of its JSON and the lines on stderr."""
    process = subprocess.run(
        [sys.executable, "-c", ONWARD, "run", str(workshop / "config.toml"), *overrides, "--json"],
        capture_output=True,
        text=True,
        cwd=workshop,
        env={**ENVIRONMENT, "ONWARD_HOME": str(workshop / "home")},
    )
    assert process.returncode == status, process.stderr
    *lines, imported = process.stderr.splitlines()
    assert imported == "False", "torch was imported"
    assert not (workshop / "home").exists(), "something was started or written"
    return json.loads(process.stdout)["problems"], lines


def _processor_time_of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def refused(workshop: Path, *overrides: str, status: int = 2) -> list[str]:
    """Return the problems that `onward run` reports, in under 3 seconds of processor time."""
    for _ in range(3):  # others may be using the machine
        before_s = _processor_time_of_children_s()
        problems, lines = run_refused(workshop, *overrides, status=status)
        if (used_s := _processor_time_of_children_s() - before_s) < 3.0:
            break
    assert used_s < 3.0
    assert lines[:2] == [
        "onward: checking the configuration, the model and the data",
        f"onward run: {EXIT_STATUSES[status].meaning}",
    ]
    assert lines[2:-1] == [line for problem in problems for line in f"  - {problem}".splitlines()]
    assert lines[-1] == f"To do: {EXIT_STATUSES[status].to_do}" + ("; no run has begun" if status == 2 else "")
    return problems


ENVIRONMENT = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}


PIPELINE = ["parallel.data=1", "parallel.pipeline=2", "train.gradient_accumulation_steps=2"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["launch.num_ranks=3"], "data 2 x tensor 1 x pipeline 1 needs 2 ranks, but launch.num_ranks is 3"),
        (["train.gradient_accumulation_steps=3"], "global_batch_size 8 does not divide over 2 replicas x 3"),
        (["train.num_setps=7"], "unknown key train.num_setps; did you mean train.num_steps?"),
        (["optimiser.name=adam"], "unknown section optimiser; did you mean optimizer?"),
        (["train.global_batch_size=-1"], "train.global_batch_size: Input should be greater than 0, not -1"),
        (["model.path=absent.onnx"], "there is no file"),
        (["data.source=absent.csv"], "there is no file, directory or glob match"),
        (["data.inputs={image='picture'}"], "input image reads column 'picture', which the data does not have"),
        (["model.output=absent"], "model.output 'absent' is not a tensor of the model; there is"),
        (["data.label=absent"], "data.label reads column 'absent', which the data does not have"),
        (["checkpoint.load=absent"], "checkpoint.load"),
        (["checkpoint.load=."], "is no complete checkpoint: it has no manifest.json"),
        (["parallel.sizes=auto", "launch.num_ranks=2"], "'auto' chooses the sizes, but given is parallel.data = 2"),
        (["model.freeze=['features.0.wieght']"], "no weight of the model matches 'features.0.wieght'; did you mean"),
        (["optimizer.weights=[{pattern='x*',alpha=0.5}]"], "optimizer.weights: no weight of the model matches 'x*'"),
        ([*PIPELINE, "parallel.cuts=['features/9']"], "parallel.cuts: the graph computes no tensor features/9"),
        (["model.converters=['absent.py']"], "model.converters: there is no file"),
        (["model.converters=['model.onnx']"], "model.onnx: it is not a Python file; its name must end with .py"),
        (["optimizer.lr=1"], "unknown key optimizer.lr; did you mean optimizer.learning_rate?"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_impossible_setting_is_reported_with_its_name(workshop: Path, overrides: list[str], sentence: str) -> None:
    (problem,) = refused(workshop, *overrides)
    assert sentence in problem


NO_GPU = "launch.device is 'cuda', and 2 ranks need a GPU, but this machine has none"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_what_the_machine_lacks_is_reported_with_everything_else_before_anything_is_started(workshop: Path) -> None:
    key, device = refused(workshop, "launch.device=cuda", "optimizer.lr=3")
    assert key.startswith("unknown key optimizer.lr")
    assert device.startswith(NO_GPU)
    (alone,) = refused(workshop, "launch.device=cuda", status=3)
    assert alone.startswith(NO_GPU)


def test_an_mlflow_server_that_is_not_there_and_too_few_slots_are_reported_at_once(workshop: Path) -> None:
    (workshop / "hosts").write_text("localhost slots=1\n")
    overrides = (f"launch.hostfile={workshop / 'hosts'}", "monitor.tracking_uri=http://127.0.0.1:1")
    slots, server = refused(workshop, *overrides, status=3)
    assert "has 1 slots on 1 host, but the job needs 2 ranks" in slots
    assert "the MLflow server http://127.0.0.1:1 does not answer" in server


def test_data_of_another_dtype_is_reported(workshop: Path) -> None:
    np.savez(workshop / "data.npz", image=np.full((20, 3, 8, 8), "x"), label=np.zeros(20, np.int64))
    hint = "; a table [data.image] makes Onward decode images"
    assert f"input image takes float32, but column 'image' holds text{hint}" in refused(workshop)


def test_data_of_another_shape_is_reported_with_both_shapes(workshop: Path) -> None:
    np.savez(workshop / "data.npz", image=np.zeros((20, 3, 9, 8), np.float32), label=np.zeros(20, np.int64))
    (problem,) = refused(workshop)
    assert problem == "input image takes [3, 8, 8] a sample, but column 'image' is float32 [3, 9, 8]"


def test_labels_whose_axes_are_in_another_order_are_reported_with_both_shapes_and_the_transpose(workshop: Path) -> None:
    g = GraphWriter("channels_last", seed=0)
    x = g.op("Transpose", g.input("image", ("batch", 3, 8, 8)), perm=[0, 2, 3, 1])
    g.output(g.op("MatMul", x, g.weight("w", g.normal(0.5, 3, 3))), ("batch", 8, 8, 3))
    onnx.save_model(g.model(), workshop / "model.onnx")
    images = np.zeros((20, 3, 8, 8), np.float32)
    np.savez(workshop / "data.npz", image=images, target=images)
    (problem,) = refused(workshop, "model.loss=mse", "data.label=target")
    assert problem == (
        "data.label must be [8, 8, 3] a sample to fit the output, but column 'target' is float32 [3, 8, 8]: their axes "
        "are in another order: store them as numpy.transpose(target, (0, 2, 3, 1)) or (0, 3, 2, 1), whichever puts "
        "each axis where the output has it"
    )


def test_labels_beyond_the_number_of_classes_are_reported(workshop: Path) -> None:
    np.savez(workshop / "data.npz", image=np.zeros((20, 3, 8, 8), np.float32), label=np.arange(20))
    (problem,) = refused(workshop)
    assert "0..19, but must be 0..3, because output logits is 4 wide" in problem


def test_a_file_that_is_not_toml_is_reported_with_its_line(workshop: Path) -> None:
    (workshop / "config.toml").write_text("[model\n")
    (problem,) = refused(workshop)
    assert "is not TOML" in problem
    assert "line 1" in problem


def test_all_problems_are_reported_at_once(workshop: Path) -> None:
    problems = refused(
        workshop, "launch.num_ranks=3", "train.num_setps=7", "model.path=absent.onnx", "data.source=absent.csv"
    )
    assert len(problems) == 4


@pytest.mark.slow
def test_converters_that_do_not_run_are_reported_with_everything_else(workshop: Path) -> None:
    (workshop / "runs.py").write_text("from onnx2torch import convert\n")
    (workshop / "fails.py").write_text("import a_library_that_is_not_installed\n")
    (workshop / "syntax.py").write_text("def\n")
    problems, _ = run_refused(workshop, "model.converters=['runs.py', 'fails.py', 'syntax.py']", "optimizer.lr=1")
    key, syntax, converter = problems
    assert syntax == f"model.converters: {workshop / 'syntax.py'}: SyntaxError: invalid syntax (syntax.py, line 1)"
    assert key.startswith("unknown key optimizer.lr")
    assert converter == (
        f"model.converters: {workshop / 'fails.py'}: ModuleNotFoundError: No module named "
        "'a_library_that_is_not_installed'"
    )


@pytest.mark.slow
def test_cuts_that_the_import_may_make_are_looked_for_in_the_imported_graph(workshop: Path) -> None:
    problems, _ = run_refused(workshop, *PIPELINE, "parallel.cuts=['pooled_']", "data.label=absent")
    label, cut = problems
    assert label.startswith("data.label reads column 'absent'")
    assert cut.startswith("parallel.cuts: the graph computes no tensor pooled_; did you mean ")


def test_metrics_that_cannot_be_measured_are_reported_at_once(workshop: Path) -> None:
    unknown, plain, parameter, missing = refused(
        workshop, 'metrics=["f1_makro", {name="cohen_kappa", average="macro"}, {name="f1", k=2}, {name="top_k"}]'
    )
    assert "there is no metric 'f1_makro'; did you mean f1_macro" in unknown
    assert "cohen_kappa does not take average; it takes no parameters" in plain
    assert "f1 does not take k; it takes average, of_class" in parameter
    assert "top_k needs k" in missing
    misfit, average = refused(workshop, 'metrics=["rmse", "auroc_micro"]')
    assert "rmse needs numbers (mse, l1, huber, giou, file), and the loss 'cross_entropy' has none; these fit" in misfit
    assert "auroc_micro: curves of classes have no micro average" in average


CHANGES_ITSELF = """
with open(__file__, "a") as file:
    file.write("# another line, as somebody might write between the permission and the ranks\\n")
"""


@pytest.mark.mpi
@pytest.mark.usefixtures("only_servers")
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        pytest.param(
            "model.converters=['mine.py']",
            r"model.converters: .*mine.py changed after it was permitted",
            marks=pytest.mark.slow,
        ),
        ('loss={name="file",file="mine.py:f"}', r".*mine.py changed since the run began"),
    ],
    ids=["converters, which the flow executes twice", "a loss, which it executes once before the ranks"],
)
@pytest.mark.slow
def test_code_that_changes_after_it_was_permitted_is_not_executed_again(
    setting: str, message: str, workshop: Path
) -> None:
    """The whole command: whoever changes the file does so while it is executed for the first time."""
    (workshop / "mine.py").write_text(f"{CHANGES_ITSELF}\ndef f(output, labels):\n    return output.sum()\n")
    process = subprocess.run(
        [sys.executable, "-c", ONWARD, "run", str(workshop / "config.toml"), setting, "parallel.data=1", "--json"],
        capture_output=True,
        text=True,
        cwd=workshop,
        env={**os.environ, "ONWARD_HOME": str(workshop / "home"), "HOME": str(workshop)},
    )
    assert process.returncode == 2, process.stderr
    (problem,) = json.loads(process.stdout)["problems"]
    assert re.match(rf"{message} \(SHA-256 \w{{12}}, now \w{{12}}\), .*put the file back, or ", problem), problem
    assert not list((workshop / "home" / "runs").glob("*/attempts")), "ranks were started"
