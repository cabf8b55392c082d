"""A loss of the user's own that fails on rows without labels is refused before anything is launched."""

from __future__ import annotations

import contextlib
import json
import re
from functools import partial
from pathlib import Path

import pytest

from onward.trainer.config.loading import build_config
from onward.trainer.data.batches.batches import one_batch
from onward.trainer.data.schema.signature import read_training_signature
from onward.trainer.data.storage.first_rows import read_first_rows
from onward.trainer.model.losses.loss import Losses
from onward.trainer.model.trainable import open_trainable
from onward.trainer.rehearsal.findings import Findings
from onward.trainer.rehearsal.guards.loss_checks import check_empty_labels
from onward.trainer.rehearsal.rehearsed_graph import RehearsedGraph
from tests.trainer.data.test_rows_without_values import FILE, ROWS, detector

GREEDY = FILE.replace("boxes.clamp(min=0).sum()", "boxes[:, 0].clamp(min=0).sum()")
"""It reads the first box of each row."""


@pytest.mark.parametrize(
    ("file", "rows", "why"),
    [
        (FILE, ROWS, ""),
        (GREEDY, ROWS, r"2 of the first rows have no labels \(boxes\).*\[2, 0\].*let loss and count take these"),
        (GREEDY, [row for row in ROWS if row["boxes"]], ""),
    ],
    ids=["takes", "fails", "none"],
)
def test_a_loss_of_a_file_is_computed_on_rows_without_labels(file, rows, why, tmp_path: Path) -> None:
    model = detector(tmp_path)
    (tmp_path / "boxes.py").write_text(file)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": str(tmp_path / "rows.jsonl"), "label": "boxes", "pad_values": {"boxes": -1.0}}
    config = build_config(
        {
            "model": {"path": model},
            "data": {"evaluation_fraction": 0.25, **data},
            "loss": {"file": f"{tmp_path / 'boxes.py'}:loss", "count": "count"},
            "train": {"num_steps": 1, "global_batch_size": 4},
        }
    )
    signature, module = read_training_signature(config.model), open_trainable(config).module
    losses = Losses(config.losses, module.output_names, module.output_shapes)
    graph = RehearsedGraph(module, losses, autocast=contextlib.nullcontext, metrics=())
    findings = Findings()
    rows = read_first_rows(config, signature, 12)
    check_empty_labels(graph, rows, partial(one_batch, rows, config, signature), findings)
    problems = [str(error) for error in findings.errors]
    assert len(problems) == bool(why)
    assert all(re.search(why, problem, re.S) for problem in problems), problems
