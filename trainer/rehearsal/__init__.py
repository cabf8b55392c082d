"""Rehearse a run before anything is launched: a few micro-batches of real rows through the graph, on one process.

`rehearse` is the process from opening the file to the record, `checks` lists what is checked and `sizes` the
micro-batches, `findings` collects the results. `rehearsed_graph` runs one micro-batch forward and backward, and names
the node at which it fails; `parity` compares the untrained file under onnxruntime with the imported module.
Only `python -m onward.trainer rehearse` imports this package. It launches no rank and changes no file.
"""
