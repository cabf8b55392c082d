"""Write the trained weights back into the ONNX file, and verify the result before it gets its name.

`export` writes and orders the steps, `verification` checks a written file, `onnx_runner` runs it under onnxruntime,
`model_file` is a parsed file, `variants` makes smaller files for deployment, `training/` writes training as ONNX
graphs. Only `python -m onward.trainer` imports these, in a process of its own, because onnxruntime can crash; they take
part in no collective and never change the original file.

`served/` predicts from raw rows with an exported file, by the preprocessing.json that `preprocessing` writes;
`raw_batches` and `predictions` read rows for it and write what it gives, and `evaluating` measures it.
"""
