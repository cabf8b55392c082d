"""Compare the roles that Onward finds in the files of exporters with the truth of the modules that were exported.

    python -m tests.bench.roles                # everything, about 10 minutes; writes docs/role-results.json
    python -m tests.bench.roles rezero swin    # two modules, in every export; writes nothing

A module is exported twice, the second time with every parameter shifted. A stored tensor that differs between the two
files is a weight, or was computed from one; every other tensor is a buffer or a constant, and must not be trained.
Running statistics are those buffers that torch.nn.BatchNorm updates. The same was measured for the committed files of
other exporters when they were written (tests/support/foreign/record.py).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from onnx import inliner
from torch import nn

from onward.trainer.onnx_graph.attribute_weights import with_operands
from onward.trainer.onnx_graph.files.index import names_read
from onward.trainer.onnx_graph.initializers import stored_tensors
from onward.trainer.onnx_import.roles.exporter_records import read_records
from onward.trainer.onnx_import.roles.roles import Role, find_roles
from tests.support import zoo
from tests.support.foreign_files import FILES
from tests.support.role_table import RESULTS
from tests.support.zoo_buffers import BUFFERS
from tests.support.zoo_parameters import PARAMETERS

EXPORTS = (("dynamo-20", False), ("dynamo-20", True), ("legacy-17", False), ("legacy-17", True))
UNWRITABLE = {("older_spectral_norm", "legacy-17", False)}
"""(module, exporter, folded) that torch cannot write."""
ALL = [*zoo.ARCHITECTURES, *PARAMETERS, *BUFFERS]


@dataclass(frozen=True)
class Verdict:
    """One stored tensor of one file."""

    module: str
    name: str
    shape: tuple[int, ...]
    truth: str
    """trained, statistic or frozen."""
    role: Role

    @property
    def right(self) -> bool:
        return self.role.kind == self.truth

    def __str__(self) -> str:
        found = f"{self.role.kind} ({self.role.reason})"
        return f"{self.module}: {self.name} {list(self.shape)} is {self.truth}, found {found}"


def verdicts(name: str, exporter: str, folded: bool) -> Iterator[Verdict]:
    """Yield a verdict for each float tensor that the file stores and reads; constants of one element only if wrong."""
    model = zoo.export(name, exporter, folded=folded)
    stored = stored_tensors(model.graph, None)
    shifted = stored_tensors(zoo.export(name, exporter, folded=folded, shifted=True).graph, None)
    statistics = set(_statistics(zoo.build(name)))
    found = roles_of(model)
    read = {reader for node in model.graph.node for reader in names_read(node)}
    for tensor_name, tensor in stored.items():
        if tensor_name not in found or tensor_name not in read:
            continue
        # a constant that the exporter merged with an equal weight is in one of the two files only
        if tensor_name not in shifted:
            continue
        # two processes may number single constants in other orders; a parameter of one element has a name of its own
        is_numbered = tensor.numel() == 1 and re.fullmatch(r"val_\d+", tensor_name)
        changes = not is_numbered and not torch.equal(shifted[tensor_name], tensor)
        # the older exporter updates running statistics when it traces a module in training mode
        truth = "statistic" if tensor_name in statistics else "trained" if changes else "frozen"
        verdict = Verdict(name, tensor_name, tuple(tensor.shape), truth, found[tensor_name])
        if tensor.numel() > 1 or truth == "trained" or not verdict.right:
            yield verdict


def roles_of(model: onnx.ModelProto) -> dict[str, Role]:
    """Return the roles as the import of the model finds them."""
    main = with_operands(model)
    main = inliner.inline_local_functions(main) if main.functions else main
    return find_roles(main.graph, stored_tensors(model.graph, None), read_records(model))


def _statistics(module: nn.Module) -> Iterator[str]:
    for path, inner in module.named_modules():
        if isinstance(inner, nn.modules.batchnorm._BatchNorm):
            yield from (f"{path}.running_mean", f"{path}.running_var")


def torch_verdicts(names: Iterable[str], exporter: str, folded: bool) -> list[Verdict]:
    """Return the verdicts on the named modules in one export of PyTorch, as far as it can write them."""
    written = [name for name in names if exporter in zoo.entry_of(name).exporters]
    written = [name for name in written if (name, exporter, folded) not in UNWRITABLE]
    return [verdict for name in written for verdict in verdicts(name, exporter, folded)]


def foreign_verdicts(exporter: str) -> Iterator[Verdict]:
    """Yield a verdict for each float tensor of the committed files of one exporter, as `verdicts` does."""
    for key, file in FILES.items():
        model = onnx.load(file.path)
        if file.exporter != exporter:
            continue
        stored, read = (
            stored_tensors(model.graph, None),
            {name for node in model.graph.node for name in names_read(node)},
        )
        for name, role in roles_of(model).items():
            trained = name in file.trained
            truth = "trained" if trained else "frozen" if role.kind == "trained" else role.kind
            verdict = Verdict(key, name, tuple(stored[name].shape) if name in stored else (), truth, role)
            if trained or not verdict.right or (name in read and name in stored and stored[name].numel() > 1):
                yield verdict


def groups(names: Sequence[str]) -> Iterator[tuple[str, str, list[Verdict]]]:
    """Yield (exporter, kind of modules, verdicts)."""
    kinds = {"networks": zoo.ARCHITECTURES, "parameters like constants": PARAMETERS, "buffers like weights": BUFFERS}
    for exporter, folded in EXPORTS:
        for kind, members in kinds.items():
            chosen = [name for name in members if name in names]
            yield f"torch {exporter}{', folded' * folded}", kind, torch_verdicts(chosen, exporter, folded)
    for exporter in sorted({file.exporter for file in FILES.values()} if len(names) == len(ALL) else ()):
        yield exporter, "foreign files", list(foreign_verdicts(exporter))


def measure(names: Sequence[str]) -> dict[str, Any]:
    """Return rates and misses as JSON."""
    rows, misses = [], []
    for exporter, kind, found in groups(names):
        wrong = [verdict for verdict in found if not verdict.right]
        rows.append({"exporter": exporter, "kind": kind, "right": len(found) - len(wrong), "tensors": len(found)})
        misses += [{"exporter": exporter, "tensor": str(verdict)} for verdict in wrong]
        print(f"{exporter}, {kind}: {len(found) - len(wrong)} of {len(found)}", *wrong, sep="\n  ", flush=True)
    versions = {package: importlib.metadata.version(package) for package in ("torch", "onnx", "onnxscript")}
    return {"versions": versions, "rows": rows, "misses": misses}


def main() -> None:
    """Measure the named modules, or everything; then keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=[])
    names = parser.parse_args().modules
    found = measure(names or ALL)
    if not names:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
