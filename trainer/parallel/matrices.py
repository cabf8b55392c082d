"""Find the weights that Muon takes by default: the matrices of the hidden layers of a graph.

    input -- embedding -- linear -- ... -- linear -- head -- output
             AdamW        Muon             Muon      AdamW            biases, norms, scalars: AdamW

Keller Jordan 2024 (https://kellerjordan.github.io/posts/muon/): "Muon is only for the hidden layers of a network".
"""

from __future__ import annotations

from onward.trainer.onnx_import.imported_graph import ImportedGraph
from onward.trainer.parallel.tensor.graph_analysis import GraphAnalysis


def find_matrices(module: ImportedGraph) -> dict[str, int]:
    """Return initializer name -> the dimension of the output features, of each matrix of a hidden layer.

    Matrices that are read by anything but matrix products, such as tied embeddings, are left out; so are those of the
    last products before an output, adapters, kernels of convolutions, and what is stacked in one tensor or read by an
    einsum.
    """
    graph = GraphAnalysis(module, module.onnx_names)
    output = next(node for node in module.graph.nodes if node.op == "output")
    # Muon is for hidden layers: the last products give the outputs
    heads = set(graph.nearest_products(output))
    output_dims: dict[str, int] = {}
    # one product that refuses a weight is enough: a tied weight stays out even if its other readers would take it
    refused: set[str] = set()
    for node, product in graph.products.items():
        readers = set(graph.readers(product.path))
        is_hidden = node not in heads and readers <= graph.products.keys() and not product.is_low_rank
        is_one_matrix = not product.is_stacked and not product.is_einsum
        if not is_hidden or not is_one_matrix or product.is_convolution:
            refused.add(product.name)
        output_dims[product.name] = product.outputs
    return {name: outputs for name, outputs in output_dims.items() if name not in refused}
