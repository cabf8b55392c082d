"""Examine a configuration, an ONNX file or two of them, without training.

`config_check` compares a configuration with the files it names (no torch), `doctor` reports what training would do with
a file, `exporter_warnings` finds what exporters do to models, `diff` compares two files tensor by tensor. Each may be
imported from outside. Nothing here changes a file, starts a rank or is called by the training loop.
"""
