"""Everything outside the training job: mpirun, the Prefect and MLflow servers, MLflow's records, TensorBoard files.

May be imported from outside: `mpirun` (start and stop a job), `services` (servers on this machine), `tracking` (the
only module that imports MLflow) and `tensorboard`. This package handles processes, files and addresses; it never
imports torch, onnx, mpi4py or Prefect, and nothing of the trainer.
"""
