"""Measure where the time of chosen steps goes: by node of the ONNX file, and by what is not a node."""
