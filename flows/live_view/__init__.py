"""The live view of a run in the terminal: phases, progress, loss, speed, memory and checkpoints, from its directory."""
