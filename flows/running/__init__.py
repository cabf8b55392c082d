"""Run a flow in this process: begin, resume, stop, end."""
