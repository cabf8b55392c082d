"""What people start: the Prefect flow `train-onnx`, the command line and deployments.

Read `train_onnx.py` first. `cli.py` and `commands/` are the command `onward`; `running/` runs the flow in this
process, `deploying/` on a schedule, `run_state/` knows the runs, `shown/` prints. May be imported from outside:
`train_onnx`, `cli.main` and the functions that the commands call. This package starts no MPI ranks itself and never
imports torch or MLflow: tasks and infra do that.
"""
