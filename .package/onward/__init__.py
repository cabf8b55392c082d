"""ONNX in, trained ONNX out, at scale."""
