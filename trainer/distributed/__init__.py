"""Processes, the mesh of ranks, and what each rank holds of a tensor.

`processes` makes this process a rank of the job, `mesh` arranges the ranks, `preflight` checks the machine, `failures`
handles stop signals and errors; `weights` defines a weight, its names and its placement, and `collectives` the
collectives inside the graph. Importing `weights` needs no torch. This package knows no model, optimizer or file format.
"""
