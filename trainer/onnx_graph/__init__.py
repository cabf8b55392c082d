"""Read, change and build ONNX graphs, without running them.

Everything here works on ONNX protos and may be imported from any package above. `index`, `builder`, `surgery`,
`new_head` and `reference_models` need onnx and numpy only, so the flow and the tasks may import them;
`tensor_protos`, `initializers` and `external_data` use torch tensors to hold values. Nothing here builds a torch
module or imports anything of `onnx_import`.
"""
