"""What runs compiled and what eagerly: static shapes, evaluation, padding; announcements; the directory of the code."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from onward.trainer.config.sections.model import GraphConfig
from onward.trainer.model import compile as compile_module
from onward.trainer.model import compiled_on_cpu
from onward.trainer.model.compile import CompileChoice, Compiler, keep_compiled_code
from onward.trainer.onnx_import.driver import to_module
from tests.support import graphs
from tests.support.accelerated import accelerate


class Recorded(nn.Module):
    """Stands for a compiled module, and records the shapes it runs with."""

    def __init__(self, module: nn.Module, calls: list[tuple[Any, ...]], **options: Any) -> None:
        super().__init__()
        self._orig_mod = module
        self.calls = calls
        self.options = options

    def forward(self, *values: Tensor) -> Any:
        self.calls.append((self.training, *(tuple(value.shape) for value in values)))
        return self._orig_mod(*values)


class Chained(nn.Module):
    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, x: Tensor) -> Any:
        return self.unit(x)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch, "compile", lambda module, **options: Recorded(module, found, **options))
    monkeypatch.setattr(compile_module, "missing_compiler", lambda: "")
    monkeypatch.setattr(compiled_on_cpu, "is_amd", lambda: False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return found


def chain_of(choice: CompileChoice, **options: Any) -> tuple[Chained, Compiler]:
    module = to_module(graphs.tiny_mlp())
    compiler = Compiler(choice, device=torch.device("cpu"), **options)
    chain = Chained(compiler.compile(module, module))
    compiler.watch(chain, ((6, 4),))
    return chain, compiler


def run(chain: Chained, batch: int, *, training: bool, gradients: bool) -> None:
    chain.train(training)
    with torch.set_grad_enabled(gradients):
        chain(torch.randn(batch, 4))


def test_static_code_runs_full_micro_batches_and_first_evaluation_shapes_only(calls: list[tuple[Any, ...]]) -> None:
    chain, _ = chain_of(CompileChoice(shapes="static"))
    for batch in (5, 5, 2):  # evaluation, its last batch smaller
        run(chain, batch, training=False, gradients=False)
    for batch in (3, 6, 6):  # resumed at a smaller micro-batch: the code is the same as in the uninterrupted run
        run(chain, batch, training=True, gradients=True)
    run(chain, 6, training=False, gradients=True)  # padding
    run(chain, 5, training=False, gradients=False)
    assert calls == [(False, (5, 4)), (False, (5, 4)), (True, (6, 4)), (True, (6, 4)), (False, (5, 4))]
    compiled: Any = chain.unit
    assert compiled.compiled.options == {"fullgraph": True, "dynamic": False, "mode": None}


def test_dynamic_code_runs_every_shape_but_padding(calls: list[tuple[Any, ...]]) -> None:
    chain, _ = chain_of(CompileChoice(shapes="dynamic"))
    run(chain, 3, training=True, gradients=True)
    run(chain, 6, training=True, gradients=True)
    run(chain, 6, training=False, gradients=True)
    assert [each[1] for each in calls] == [(3, 4), (6, 4)]


@pytest.mark.filterwarnings("default")  # dynamo's own
def test_beyond_the_limit_of_recompilations_it_runs_eagerly_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    compile_, compiled_for = torch.compile, list[tuple[int, ...]]()

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        compiled_for.append(tuple(inputs[-1].shape))
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda module, **_: compile_(module, fullgraph=True, dynamic=False, backend=backend)
    )
    monkeypatch.setattr(compile_module, "missing_compiler", lambda: "")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    chain, _ = chain_of(CompileChoice())
    plain = to_module(graphs.tiny_mlp())
    with torch._dynamo.config.patch(recompile_limit=2):
        for batch in (2, 3, 4, 5, 3, 4):
            x = torch.randn(batch, 4)
            assert torch.equal(chain(x), plain(x))
    assert len(compiled_for) == 2
    assert caplog.text.count("run eagerly") == 1


def test_each_compilation_is_announced_and_beats_before_and_after(
    calls: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    beats: list[int] = []
    chain, _ = chain_of(CompileChoice(), beat=lambda: beats.append(len(calls)))
    with caplog.at_level(logging.INFO):
        for training in (False, True, True):
            run(chain, 6, training=training, gradients=training)
    assert beats == [0, 1, 1, 2]
    assert [record.message.rsplit(" in ", 1)[0] for record in caplog.records] == [
        "graph.compile: 1 of 1 compiled for evaluation",
        "graph.compile: 1 of 1 compiled for training",
    ]


def test_cuda_graphs_are_told_where_a_micro_batch_begins(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begins: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begins.append(len(calls)))
    chain, _ = chain_of(CompileChoice(shapes="static", mode="reduce-overhead"))
    for _ in range(3):
        run(chain, 6, training=True, gradients=True)
    assert begins == [0, 1, 2]


def test_repeated_blocks_are_compiled_once(calls: list[tuple[Any, ...]]) -> None:
    model = graphs.tiny_transformer()
    plain, ids = to_module(model), torch.arange(16)[None]
    compiled = accelerate(to_module(model), GraphConfig(compile="repeated"), torch.device("cpu"))
    assert isinstance(compiled, fx.GraphModule)
    assert torch.equal(compiled(ids), plain(ids))
    blocks = [child for child in compiled.children() if isinstance(child, compile_module.Compiled)]
    assert (len(blocks), len(calls)) == (3, 4)  # embedding, 2 layers, head


def test_compiled_code_is_kept_below_onward_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    folder = keep_compiled_code()
    assert folder is not None
    assert folder.parent == tmp_path / "compiled"
    assert folder.is_dir()
    assert keep_compiled_code() == folder
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    assert keep_compiled_code() == tmp_path / "own"


def test_where_nothing_can_be_written_torch_keeps_its_own_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ONWARD_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    assert keep_compiled_code() is None
    assert "cannot be kept in" in caplog.text
