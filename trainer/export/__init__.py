"""Write the trained weights back into the ONNX file, and verify the result before it gets its name.

`exported_model` writes and orders the steps, `file_verification` checks a written file, `model_file` is a parsed file.
`measuring/` runs files under onnxruntime, `variants/` makes smaller files for deployment, `training/` writes training
as ONNX graphs. Only `python -m onward.trainer` imports these, in a process of its own, because onnxruntime can crash;
they take part in no collective and never change the original file.

`served/` predicts from raw rows with an exported file, by the preprocessing.json that `preprocessing/` writes;
`measuring/` reads rows for it, writes what it gives, and measures it.
"""
