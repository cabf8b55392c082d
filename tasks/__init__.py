"""The seven Prefect tasks of the flow `train-onnx`, one module each.

A task reads what earlier tasks left in the run directory, writes exactly one record there, and returns it; repeating a
task is safe. May be imported from outside: the tasks, and the functions that the command line shares with them
(`checks.rehearsing.Preparation`, `export.export_file`). Tasks do not import each other, train nothing in their own
process and never import torch: mpirun and processes of the trainer do the work. `checks/`, `attempts/`, `shown/` and
`promotion/` have what the tasks use.
"""
