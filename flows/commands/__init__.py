"""The commands of `onward`, grouped as `onward --help` groups them; `onward.flows.cli` registers them.

A command reads its arguments, calls one function of flows, tasks or the trainer, and prints the result. Only
`onward.flows.cli` imports from here. Imports that take more than some milliseconds are inside the commands, so that
`onward --help` loads neither torch nor Prefect nor pydantic.
"""
