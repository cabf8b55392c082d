"""The training job: from a run directory with a configuration to checkpoints and an exported ONNX file.

`python -m onward.trainer train RUN_DIR` is one rank. The job runs under mpirun, srun or torchrun on nodes that have
neither Prefect nor MLflow: nothing in here imports them. `loop.py` is the training loop; read it first. The packages
below it import downwards only: parallel and export; model, optim, checkpoint and diagnostics; onnx_import, data and
distributed; onnx_graph; run; config; errors and events.
"""
