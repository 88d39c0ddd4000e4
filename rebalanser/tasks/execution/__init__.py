"""Execution of tasks: claims for this process, their bodies, renewals and outcomes."""
