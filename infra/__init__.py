"""Everything outside the training job: mpirun, the Prefect and MLflow servers, MLflow's records, TensorBoard, W&B.

May be imported from outside: `mpirun` (start and stop a job), `services` (servers on this machine), `tracking` (the
only module that imports MLflow), `tensorboard` and `weights_and_biases`. This package handles processes, files and
addresses; it never imports torch, onnx, mpi4py or Prefect, and nothing of the trainer.
"""
