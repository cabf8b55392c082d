"""Write the trained weights back into the ONNX file, and verify the result before it gets its name.

`export` writes and orders the steps, `verification` checks a written file, `onnx_runner` runs it under onnxruntime,
`model_file` is a parsed file, `variants` makes smaller files for deployment, `training/` writes training as ONNX
graphs. Only `python -m onward.trainer` imports this package, in a process of its own, because onnxruntime can crash;
it takes part in no collective and never changes the original file.
"""
