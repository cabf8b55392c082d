"""One attempt of a training: what the loop calls in one line each, above the model, the optimizer and the checkpoints.

restore      begin with the newest checkpoint of the run, with one of another run, or at step 0
agreement    what the ranks agree on in each step
evaluation   evaluate the weights, and their moving average
"""
