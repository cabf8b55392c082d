"""Write training as four ONNX graphs that stock onnxruntime runs without torch.

`files` writes them with a record of every name; `loss_graph` adds the losses, whose formulas are in `loss_nodes`;
`gradients` records losses and gradients as one graph, `decompositions` writes out ATen calls that ONNX lacks,
`optimizer_graph` is one weight update. From outside, import `files.write_artifacts`. The graphs never contain Onward's
own adapters or `graph.dropout`.
"""
