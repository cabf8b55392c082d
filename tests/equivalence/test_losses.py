"""Losses are sums over counts: on any ranks, micro-batches and ragged ends they are what torch computes on one.

Each run has three steps: two full ones and one of a single sample, for which a replica has no sample at all. Value and
gradients of the first and of the last step of one rank are torch's own on the whole batch at once; every other layout
has the values, gradients and weights of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

from onward.trainer.data.batches.batches import Batches, one_batch
from onward.trainer.data.resolve import resolve
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.model.trainable import load_weights, open_trainable
from onward.trainer.onnx_import.imported_graph import named_weights
from onward.trainer.parallel.planning.planner import plan
from onward.trainer.run.directory import RunDir, read_config
from tests.equivalence.layouts import NUM_STEPS, TOLERANCE, differences, tensors
from tests.equivalence.loss_cases import BATCH, CASES, MICRO_BATCHES, ROWS, Case
from tests.support.ranks import run_ranks
from tests.support.runs import events, losses, make_run

LAYOUTS: dict[str, dict[str, int]] = {
    "alone": {},
    "dp2": {"data": 2},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "dp2 x pp2": {"data": 2, "pipeline": 2},
}


def make_case(case: Case, folder: Path, layout: str) -> RunDir:
    parallel = LAYOUTS[layout]
    folder.mkdir(parents=True)
    for name, content in case.files.items():
        (folder / name).write_bytes(content)
    data: dict[str, Any] = {"evaluation_source": str(folder / "held-out.npz")}
    columns = case.columns
    if case.is_ragged:  # which an .npz cannot hold
        (folder / "rows.jsonl").write_text(case.json_lines())
        data = {"source": str(folder / "rows.jsonl"), "evaluation_source": str(folder / "rows.jsonl")}
        columns = {}
    else:
        np.savez(folder / "held-out.npz", **columns)
    return make_run(
        folder,
        case.model(),
        columns,
        data=data,
        loss=case.losses(folder),
        train={
            "global_batch_size": BATCH,
            "gradient_accumulation_steps": 1 if case.at_once else MICRO_BATCHES // parallel.get("data", 1),
            # one row is like no other, so that the loss of info_nce would be 0
            "num_epochs": (2 * BATCH + (3 if case.at_once else 1)) / ROWS,
            "clip_norm": 0.0,
        },
        optimizer={"name": "adamw", "epsilon": 1e-3},
        parallel={**parallel, "convolutions": "always"},
        checkpoint={"period": 1, "keep_newest": 9},
    )


Trained = Mapping[str, Mapping[str, RunDir]]
"""Case -> layout -> its run."""


def trained(wanted: Mapping[str, Iterable[str]], folder: Path, *, timeout_s: float = 300) -> Trained:
    """Train cases in their layouts and on one rank; one mpirun for each number of ranks trains one after the other."""
    runs: dict[str, dict[str, RunDir]] = {}
    for number, (name, layouts) in enumerate(wanted.items()):
        runs[name] = {}
        for place, layout in enumerate(["alone", *layouts]):
            runs[name][layout] = make_case(CASES[name], folder / f"{number}-{place}", layout)
    everyone = [run for own in runs.values() for run in own.values()]
    for size in sorted({read_config(run).world_size for run in everyone}):
        roots = [str(run.root) for run in everyone if read_config(run).world_size == size]
        run_ranks(size, "tests.equivalence.layouts:train_all", roots, timeout_s=timeout_s)
    return runs


# -- against torch in one process


class ByHand:
    """What torch computes on a whole batch at once, with the weights of a step's checkpoint, 0 being the file's."""

    def __init__(self, case: Case, run: RunDir, step: int) -> None:
        config = read_config(run)
        self.case = case
        self.module = open_trainable(config).module
        if step:
            load_weights(self.module, tensors(run, step, "model/"))
        self.signature = read_training_signature(config.model)
        rows = open_shards(run.shards, "train")
        config = resolve(config, rows, self.signature)
        self.config = config.model_copy(
            update={"train": config.train.model_copy(update={"gradient_accumulation_steps": 1})}
        )
        self.shards = rows

    def step(self, position: int, count: int) -> tuple[float, dict[str, Tensor]]:
        """The loss of the samples at these positions of the stream, and its gradients."""
        share = {"replica": 0, "num_replicas": 1}
        stream = Batches(self.shards, self.config, self.signature, **share, device=torch.device("cpu"))
        (batch,) = stream.take(position, count)
        stream.close()
        loss = self._loss(batch.inputs, batch.labels)
        self.module.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {n: w.grad for n, w in named_weights(self.module).items() if w.grad is not None}
        return float(loss.detach()), gradients

    @torch.no_grad()
    def evaluation(self) -> float:
        """The loss of all rows that are held out."""
        rows = open_shards(self.shards._directory, "evaluation")
        batch = one_batch(rows, self.config, self.signature, np.arange(rows.num_rows))
        return float(self._loss(batch.inputs, batch.labels))

    def _loss(self, inputs: Sequence[Tensor], labels: Sequence[Tensor | None]) -> Tensor:
        outputs = self.module.train()(*inputs)
        return self.case.formula((outputs,) if isinstance(outputs, Tensor) else outputs, labels)


def moments(run: RunDir, step: int) -> dict[str, Tensor]:
    """Adam's first moments after a step: 0.9 x those before it + 0.1 x gradient."""
    if not step:
        return {}
    found = tensors(run, step, "optimizer/")
    ending = "/moment_1"
    return {name.removesuffix(ending): tensor for name, tensor in found.items() if name.endswith(ending)}


def assert_step_as_by_hand(case: Case, run: RunDir, step: int, count: int) -> None:
    """Loss and gradients of a step of `count` samples, after steps of BATCH, are what torch computes on one rank."""
    by_hand = ByHand(case, run, step - 1)
    loss, expected = by_hand.step((step - 1) * BATCH, count)
    assert losses(run)[step] == pytest.approx(loss, rel=1e-5, abs=1e-7), f"loss of step {step}"
    found, before = moments(run, step), moments(run, step - 1)
    largest = max(float(each.abs().max()) for each in expected.values())
    assert largest > 0
    for name, gradient in expected.items():
        own = 10 * found[name] - 9 * before.get(name, torch.zeros(()))
        off = float((own - gradient).abs().max())
        assert off <= 2e-5 * largest, f"step {step}: gradient of {name} is {off / largest:.1e} off"


def assert_as_by_hand(case: Case, run: RunDir) -> None:
    for step, count in ((1, BATCH), (NUM_STEPS, 3 if case.at_once else 1)):
        assert_step_as_by_hand(case, run, step, count)
    if not case.at_once:  # info_nce compares the rows of an evaluation batch
        (*_, last) = events(run, "evaluation")
        value = ByHand(case, run, last.step).evaluation()
        assert last.values["evaluation/loss"] == pytest.approx(value, rel=1e-5)


def problems(runs: Trained) -> dict[str, object]:
    """Case and layout -> what differs from torch, or from one rank."""
    found: dict[str, object] = {}
    for name, own in runs.items():
        case = CASES[name]
        try:
            assert_as_by_hand(case, own["alone"])
        except AssertionError as error:
            found[name] = error
        # what every replica evaluates with info_nce are its own rows only
        skipped = {"evaluation"} if case.at_once else set()
        for layout, run in own.items():
            if layout != "alone":
                each = differences(run, own["alone"])
                if max(value for key, value in each.items() if key not in skipped) > TOLERANCE:
                    found[f"{name}, {layout}"] = each
    return found


# each kind of sum over replicas with shares of different size and with none; pipelines and shards are slower
QUICK = {
    "two heads": ["dp2", "pp2", "tp2"],
    "square images, weights and smoothing": ["dp2", "pp2"],
    "cross-entropy and dice of one output": ["dp2"],
    "balanced classes": ["dp2"],
    "towers over all replicas": ["dp2"],
    "ctc with input lengths": ["dp2"],
    "Python file with a count": ["dp2"],
}


@pytest.mark.mpi
def test_losses_train_on_any_ranks_as_torch_trains_them_on_one(tmp_path: Path) -> None:
    runs = trained(QUICK, tmp_path)
    assert problems(runs) == {}
    for run in runs["two heads"].values():
        for event in events(run, "evaluation"):
            values = event.values
            parts = values["evaluation/kinds/loss"] + 0.25 * values["evaluation/level/loss"]
            assert values["evaluation/loss"] == pytest.approx(parts, rel=1e-6)
            assert {"evaluation/kinds/accuracy", "evaluation/level/mae"} < values.keys()


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "alone"])
def test_every_loss_trains_in_every_layout_as_on_one_rank(layout: str, tmp_path: Path) -> None:
    # the towers are compared over replicas: their loss takes neither pipelines nor several micro-batches
    wanted = {name: [layout] for name, case in CASES.items() if layout in ("dp2", "tp2") or not case.at_once}
    assert problems(trained(wanted, tmp_path, timeout_s=1800)) == {}


@pytest.mark.parametrize("name", ["ctc with input lengths", "Python file that chooses elements"])
def test_a_loss_that_depends_on_the_values_of_labels_can_be_planned(name: str, tmp_path: Path) -> None:
    found = plan(read_config(make_case(CASES[name], tmp_path / "run", "pp2")))
    assert len(found.stages) == 2


def test_the_product_has_every_loss() -> None:
    from onward.trainer.config.loss_rules import LOSS_RULES
    from onward.trainer.model.losses.loss_formulas import FORMULAS

    used = {each.get("name", "cross_entropy") for case in CASES.values() for each in case.losses(Path("x"))}
    used |= {"file" for case in CASES.values() for each in case.losses(Path("x")) if "file" in each}
    # those of objects need images, and are in test_detectors.py
    of_objects = {name for name in FORMULAS if LOSS_RULES[name].labels == "objects"}
    assert used >= {*FORMULAS, "file"} - of_objects


def test_an_onnx_loss_is_a_file_that_the_checker_accepts() -> None:
    onnx.checker.check_model(onnx.load_from_string(CASES["ONNX file"].files["my_loss.onnx"]))
