"""Hostile inputs: generated files of every kind that Onward reads, through the commands that users type.

A case is made by a family (onnx_files.py, config_files.py, data_files.py, record_files.py) from a seed, and tried in a
process of its own (sandbox.py), which may take 1 GB of memory, some seconds, and no file outside of its directory.
"""
