"""Read and write ONNX files: tensors outside of the file, memory maps, checks before a session opens."""
