"""How the modules of a rank are compiled: what `auto` chooses, what is refused, and that each layout trains."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from onward.trainer.config.loading import build_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.errors import ConfigError
from onward.trainer.model.compile import CompileChoice
from onward.trainer.onnx_graph.examples.reference_models import build_gpt2
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.parallel.compile_stages import choose
from tests.support import graphs, runs
from tests.support.graphs import feed

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LEAF = """<ir_version: 8, opset_import: ["" : 17]>
g (float[batch, 4] x) => (float[2, n] places, float[batch, 4] y)
{ found = NonZero(x) places = Cast <to = 1> (found) y = Relu(x) }"""


def config_of(graph: dict[str, Any], **sections: Any) -> RunConfig:
    return build_config(
        {
            "name": "test",
            "model": {"path": "model.onnx"},
            "data": {"source": "data.npz"},
            "train": {"num_steps": 1, "gradient_accumulation_steps": 8},
            "graph": {"compile": True} | graph,
            **sections,
        }
    )


def chosen(
    model: onnx.ModelProto,
    graph: dict[str, Any],
    *,
    device: torch.device = CUDA,
    one_shape: bool = True,
    batch: int = 2,
    **sections: Any,
) -> CompileChoice:
    example = [torch.from_numpy(value) for value in feed(model, batch).values()]
    config = config_of(graph, **sections)
    return choose(
        to_module(model),
        config.graph,
        config.parallel,
        config.precision.compute,
        example,
        device=device,
        one_shape=one_shape,
        autocast=nullcontext,
    )


def test_auto_is_static_where_all_samples_have_one_shape(caplog: pytest.LogCaptureFixture) -> None:
    mlp = graphs.tiny_mlp()
    with caplog.at_level(logging.INFO):
        assert chosen(mlp, {}, device=CPU) == CompileChoice("static", "default", "whole")
        assert chosen(mlp, {}, device=CPU, one_shape=False) == CompileChoice("dynamic", "default", "whole")
    assert "static shapes, mode default, whole" in caplog.text
    assert chosen(mlp, {"compile": "dynamic"}, device=CPU).shapes == "dynamic"


def test_auto_captures_cuda_graphs_of_launch_bound_models_only(caplog: pytest.LogCaptureFixture) -> None:
    mlp = graphs.tiny_mlp()
    with caplog.at_level(logging.INFO):
        assert chosen(mlp, {}).mode == "reduce-overhead"
    assert (
        "mode reduce-overhead (estimated for a micro-batch: 0.020 ms of launches, 0.000 ms of computing)" in caplog.text
    )
    assert chosen(mlp, {}, batch=1 << 20).mode == "default"
    for sections in ({"tensor": 2}, {"pipeline": 2}, {"zero": 1}):
        assert chosen(mlp, {}, parallel=sections).mode == "default"
    assert chosen(mlp, {}, one_shape=False).mode == "default"
    assert chosen(onnx.parser.parse_model(LEAF), {}).mode == "default"
    assert chosen(mlp, {"compile": "max-autotune-no-cudagraphs"}).mode == "max-autotune-no-cudagraphs"


def test_cuda_graphs_are_refused_with_every_reason() -> None:
    wanted = {"compile": "reduce-overhead"}
    with pytest.raises(ConfigError, match="impossible on a CPU and with dynamic shapes; use 'default'"):
        chosen(graphs.tiny_mlp(), wanted, device=CPU, one_shape=False)
    with pytest.raises(ConfigError, match="impossible with 2 nodes that are computed by Python"):
        chosen(onnx.parser.parse_model(LEAF), wanted)
    assert chosen(graphs.tiny_mlp(), wanted).mode == "reduce-overhead"
    problems: dict[str, dict[str, Any]] = {
        "pipeline": {"parallel": {"pipeline": 2}},
        "zero": {"parallel": {"zero": 3}},
        "'cpu'": {"launch": {"device": "cpu"}},
    }
    for words, sections in problems.items():
        with pytest.raises(ConfigError, match=f"'reduce-overhead' captures CUDA graphs and cannot.*{words}"):
            config_of(wanted, **sections)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"pipeline": 2}},
        {"parallel": {"data": 2, "zero": 3}},
        {"parallel": {"units": 2}, "recompute": {"mode": "whole"}},
        {"graph": {"compile": "repeated"}},
    ],
    ids=["pipeline", "ZeRO 3", "recomputed", "repeated"],
)
def test_compiled_each_layout_trains_as_it_does_eagerly(tmp_path: Path, sections: dict[str, Any]) -> None:
    gpt2 = build_gpt2(vocab_size=32, sequence_length=16, num_layers=4, num_heads=2, width=32, dropout=0.0)
    found = []
    for name in ("eager", "compiled"):
        compiled = {"graph": {"compile": True}} | sections if name == "compiled" else sections | {"graph": {}}
        run = runs.make_run(
            tmp_path / name,
            gpt2,
            runs.tiny_text(42),
            # 33 samples: the last micro-batches are smaller
            **{"train": {"global_batch_size": 8, "gradient_accumulation_steps": 2, "num_epochs": 1.0}},
            launch={"heartbeat_timeout_s": 300},
            **compiled,
        )
        runs.train_run(run, timeout_s=400)
        found.append(runs.final_tensors(run))
        log = run.log(run.current_attempt).read_text()
        assert ("graph.compile: static shapes" in log) == (name == "compiled")
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-3, atol=1e-4)
