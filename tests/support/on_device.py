"""Run imported models on devices that this machine does not have, and print what happens: one JSON line for each.

python -m tests.support.on_device {stand-in,fake} {suite,sample,zoo NAME=FILE ...}

stand-in: real values, forward and backward (stand_in_device.py). fake: torch's FakeTensorMode with device cuda:0,
forward, without and with autocast. suite: ONNX's cases, once with operands as inputs of the graph and once with
operands stored in the file; sample: the first case of each set of operators. zoo: files of tests/support/zoo.py.

A process of its own: both devices change torch for the whole process.
"""

from __future__ import annotations

import ctypes
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from onward.trainer.errors import UnsupportedModel
from onward.trainer.onnx_import.driver import to_module
from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.parallel.planning.dry_run import replaced_weights
from tests.support import suite, zoo
from tests.support.stand_in_device import DeviceTensor, StandInDevice, weights_on_device

BATCH = 3
NOT_DIFFERENTIABLE = ("is not differentiable with respect to argument", "the derivative for", "not implemented for")
"""What torch says of operators that have no gradient for an operand."""


@dataclass
class Run:
    """What happened to one model on the device."""

    name: str
    operators: str
    problem: str = ""
    copies: list[str] = field(default_factory=list)
    """Tensors that the forward pass copied from the host."""
    reads: list[str] = field(default_factory=list)
    """Values and lengths that the forward pass read from the device."""
    of_backward: list[str] = field(default_factory=list)
    """Copies and reads of the backward pass."""


def on_stand_in(module: ImportedGraph, inputs: Sequence[Any], run: Run, *, differentiate: bool = True) -> None:
    device, stage = StandInDevice(), "forward"
    try:
        with device, weights_on_device(module):
            given = device.put(list(inputs))
            for value in pytree.tree_leaves(given) if differentiate else []:
                if isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64):
                    value.requires_grad_()
            results = [x for x in pytree.tree_leaves(module(*given)) if isinstance(x, torch.Tensor)]
            run.copies, run.reads = list(device.copies_to_device), list(device.host_reads)
            if not all(isinstance(result, DeviceTensor) for result in results):
                run.problem = "a result is on the host"
            stage = "backward"
            if losses := [result.float().sum() for result in results if result.requires_grad]:
                torch.autograd.backward(losses)
            events = [*device.copies_to_device, *device.host_reads]
            run.of_backward = events[len(run.copies) + len(run.reads) :]
    except Exception as error:  # of any kind: it is the result
        if differentiate and any(text in str(error) for text in NOT_DIFFERENTIABLE):
            on_stand_in(module, inputs, run, differentiate=False)
        else:
            run.problem = f"{stage}: {_text(error)}"


def on_fake_cuda(module: ImportedGraph, inputs: Sequence[Any], run: Run) -> None:
    def place(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda:0")

    for autocast, mixed in ((False, False), (True, False), (True, True)):
        try:
            with FakeTensorMode(), torch.no_grad(), replaced_weights(module, place):
                given = pytree.tree_map_only(torch.Tensor, place, list(inputs))
                if mixed:  # as if an operation that autocast runs in half precision had given the first operand
                    given[:1] = [x.half() if _is_fp32(x) else x for x in given[:1]]
                with torch.autocast("cuda", torch.float16, enabled=autocast):
                    results = module(*given)
        except Exception as error:  # of any kind: it is the result
            run.problem = f"{'autocast: ' if autocast else ''}{'mixed types: ' if mixed else ''}{_text(error)}"
            return
        if any(x.device.type != "cuda" for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)):
            run.problem = "a result is on the host"


def _is_fp32(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def allow_fake_cuda() -> None:
    """Give torch a device guard for CUDA that does nothing, which a build without CUDA lacks: that of meta tensors."""
    cuda, meta = 1, 14  # c10::DeviceType
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * (meta + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    registry[cuda] = registry[cuda] or registry[meta]
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False  # type: ignore[attr-defined]


def _text(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error) or ' ').splitlines()[0][:200]}"


Model = tuple[str, onnx.ModelProto, Callable[[ImportedGraph], Sequence[Any]]]


def suite_models(*, sample: bool) -> Iterator[Model]:
    """Yield (name, model, its inputs) of ONNX's cases."""
    seen: set[str] = set()
    for case in suite.cases():
        operators = _operators(case.model)
        if sample and (operators in seen or suite.is_expanded(case)):
            continue
        seen.add(operators)

        def inputs(module: ImportedGraph, values: Sequence[Any] = case.data_sets[0][0]) -> Sequence[Any]:
            return [suite.as_torch(value) for value in values[: len(module.input_names)]]

        yield case.name, case.model, inputs
        if (stored := suite.with_stored_operands(case)) is not None:
            yield f"{case.name} stored", stored, inputs


def zoo_models(files: Sequence[str]) -> Iterator[Model]:
    """Yield (name, model, its inputs) of files given as ARCHITECTURE=FILE."""
    for argument in files:
        name, _, file = argument.partition("=")
        feed = zoo.feed(name, BATCH)
        yield Path(file).stem, onnx.load(file), lambda module, feed=feed: [feed[key] for key in module.input_names]


def _operators(model: onnx.ModelProto) -> str:
    return " ".join(sorted({node.op_type for node in model.graph.node}))


def main(device: str, what: str, *files: str) -> None:
    warnings.simplefilter("ignore")
    judge = {"stand-in": on_stand_in, "fake": on_fake_cuda}[device]
    if device == "fake":
        allow_fake_cuda()
    models = zoo_models(files) if what == "zoo" else suite_models(sample=what == "sample")
    for name, model, inputs in models:
        try:
            module = to_module(model)
        except UnsupportedModel:
            continue
        run = Run(name, _operators(model))
        judge(module.train(what == "zoo"), inputs(module), run)
        print(json.dumps(asdict(run)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
