"""A file whose helper nodes cost time comes back with `optimized` beside it, here and in the model registry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from onward.infra.mlflow.tracking import Tracker
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import ExportedModel, RunIdentity, read_record
from tests.support.graphs import with_helpers
from tests.support.workshop import Workshop

pytestmark = [pytest.mark.usefixtures("only_servers"), pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    workshop = Workshop.made(tmp_path)
    yield workshop
    workshop.close()


def test_a_file_with_costly_helper_nodes_has_optimized_beside_it(workshop: Workshop) -> None:
    onnx.save_model(with_helpers(60), workshop.root / "helpers.onnx")
    random = np.random.default_rng(0)
    x = random.normal(size=(64, 64)).astype(np.float32)
    np.savez(workshop.root / "rows.npz", x=x, label=np.arange(64) % 4)
    (workshop.root / "helpers.toml").write_text(f"""
[model]
path = "{workshop.root / "helpers.onnx"}"
[data]
source = "{workshop.root / "rows.npz"}"
[train]
num_steps = 2
global_batch_size = 8
""")
    facts = workshop.onward("run", str(workshop.root / "helpers.toml"))
    run = RunDir(Path(facts["directory"]))
    exported = read_record(run.exported, ExportedModel)
    assert "without them the file runs in" in exported.helpers
    (variant,) = exported.variants
    assert (variant.kind, variant.refused) == ("optimized", "")
    assert variant.path is not None
    given, optimized = (
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for path in (exported.path, variant.path)
    )
    np.testing.assert_allclose(given, optimized, rtol=1e-4, atol=1e-6)
    assert "CastLike" not in {node.op_type for node in onnx.load(variant.path).graph.node}
    client = Tracker(read_record(run.identity, RunIdentity).tracking_uri)._client
    registered = client.get_model_version(exported.registered_as, exported.version)
    folder = Path(registered.source.removeprefix("file://"))
    assert (folder / "model.onnx").read_bytes() == exported.path.read_bytes()
    assert (folder / variant.path.name).read_bytes() == variant.path.read_bytes()
