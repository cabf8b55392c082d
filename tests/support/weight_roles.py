"""What an imported graph does with each stored tensor, and why."""

from __future__ import annotations

from onward.trainer.onnx_import.imported_graph import ImportedGraph


def describe_weights(module: ImportedGraph) -> list[tuple[str, str, str]]:
    """Return (initializer name, "trained" | "statistic" | "frozen", reason) of every stored float tensor.

    Trained tensors come first, then statistics, then frozen ones.
    """
    parameters = {module.onnx_names[path]: parameter for path, parameter in module.named_parameters()}
    rows = []
    for name, role in module.roles.items():
        original = module.copies[name][0] if name in module.copies else name
        if original in parameters and not parameters[original].requires_grad:
            rows.append((name, "frozen", "by model.train or model.freeze"))
        else:
            rows.append((name, role.kind, role.reason))
    return sorted(rows, key=lambda row: ("trained", "statistic", "frozen").index(row[1]))
