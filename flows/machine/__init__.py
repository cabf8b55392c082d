"""`onward doctor` without a model: examine this machine, and the hosts of a hostfile, before a run is tried on them.

`examine` runs all checks, each bounded in time, and returns a `MachineReport`; `findings` has the records. The other
files have the checks of one subject each: `mpi`, `file_system`, `resources`, `network` (names, proxies, servers
and hosts), `packages`. A check tries the thing itself wherever that is possible.
"""
