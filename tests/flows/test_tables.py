"""The table of docs/how-to/train-on-tables.md goes through a whole run, and is served from preprocessing.json."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pandas as pd
import pytest

from onward.trainer.data.storage.opened_shards import open_shards
from onward.trainer.run.directory import RunDir, read_config
from tests.support.exported_runs import serve
from tests.support.ranks import ROOT
from tests.support.workshop import Workshop

pytestmark = [pytest.mark.usefixtures("only_servers"), pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = Path(ROOT) / "docs" / "how-to" / "train-on-tables.md"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    workshop = Workshop(tmp_path_factory.mktemp("workshop"))
    yield workshop
    workshop.close()


def test_a_table_with_names_gaps_and_decimal_commas_is_trained_and_served(workshop: Workshop) -> None:
    text = PAGE.read_text()
    # the network, then its table, in a note that can be unfolded
    network, table_of_page = re.findall(r"^    ```python\n(.*?)^    ```", text, re.S | re.M)
    [config] = re.findall(r'```toml title="churn.toml"\n(.*?)```', text, re.S)
    (workshop.root / "make.py").write_text(textwrap.dedent(network + table_of_page))
    (workshop.root / "churn.toml").write_text(config)
    subprocess.run([sys.executable, "make.py"], cwd=workshop.root, check=True)
    facts = workshop.onward("run", str(workshop.root / "churn.toml"))
    assert facts["after"]["evaluation/accuracy"] > 0.9
    assert "classes of stays: 0 = no, 1 = yes" in facts["data"]
    assert "missing = median: age (" in facts["data"]
    run = RunDir(Path(facts["directory"]))
    assert read_config(run).data.inputs["numbers"] == ("f_income", "f_visits", "age", "age_missing")

    # what is copied into registered models computes the inputs from the raw table
    exported = Path(facts["model"])
    recipe = json.loads((run.root / "export" / "preprocessing.json").read_text())
    table = pd.read_csv(workshop.root / "customers.csv", sep=";", decimal=",", encoding="latin-1")
    inputs = serve().model_inputs(recipe, {name: table[name].tolist() for name in table}, exported.parent)
    logits = onnxruntime.InferenceSession(exported).run(["logits"], inputs)[0]
    names = np.array(recipe["outputs"][0]["classes"])[logits.argmax(axis=1)]
    assert (names == table["stays"]).mean() > 0.9
    # and these are the inputs that training read, bit for bit
    shards = open_shards(run.shards, "evaluation")
    rows = shards.read(np.arange(shards.num_rows))
    served = {tuple(row) for row in np.asarray(inputs["numbers"]).tolist()}
    stored = np.stack([np.asarray(rows[name]) for name in ("f_income", "f_visits", "age", "age_missing")], axis=-1)
    assert {tuple(row) for row in stored.tolist()} <= served
