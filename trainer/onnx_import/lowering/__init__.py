"""From nodes of ONNX to calls of torch: the table of converters, functions, runtime nodes."""
