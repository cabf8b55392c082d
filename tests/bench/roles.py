"""Compare the roles that Onward finds in files of PyTorch's exporters with the truth of the modules.

    python -m tests.bench.roles            # prints a table of all exporters, and every tensor with a wrong role

A module is exported twice, the second time with every parameter shifted. A stored tensor that differs between the two
files is a weight, or was computed from one; every other tensor is a buffer or a constant, and must not be trained.
Running statistics are those buffers that torch.nn.BatchNorm updates.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx
import torch
from onnx import inliner
from torch import nn

from onward.trainer.onnx_graph.attribute_weights import with_operands
from onward.trainer.onnx_graph.index import names_read
from onward.trainer.onnx_graph.initializers import stored_tensors
from onward.trainer.onnx_import.exporter_records import read_records
from onward.trainer.onnx_import.roles import Role, find_roles
from tests.support import zoo
from tests.support.zoo_roles import BUFFERS, PARAMETERS

UNWRITABLE = ("older_spectral_norm",)
"""Modules that not every export can write."""
EXPORTS = (("dynamo-20", False), ("dynamo-20", True), ("legacy-17", False), ("legacy-17", True))


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
        changes = not torch.equal(shifted[tensor_name], tensor)
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


def results(modules: Iterable[str]) -> Iterator[tuple[str, list[Verdict]]]:
    """Yield (export, its verdicts) for the named modules."""
    for exporter, folded in EXPORTS:
        written = [name for name in modules if exporter in zoo.entry_of(name).exporters and name not in UNWRITABLE]
        found = [verdict for name in written for verdict in verdicts(name, exporter, folded)]
        yield f"{exporter}{', folded' * folded}", found


def main() -> None:
    """Print the table and the misses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=[*PARAMETERS, *BUFFERS, *zoo.ARCHITECTURES])
    misses: list[str] = []
    print("| export | right roles |\n|---|---|")
    for export, found in results(parser.parse_args().modules):
        wrong = [verdict for verdict in found if not verdict.right]
        misses += [f"- {export}: {verdict}" for verdict in wrong]
        print(f"| {export} | {len(found) - len(wrong)} of {len(found)} |")
    print("", *misses, sep="\n")


if __name__ == "__main__":
    main()
