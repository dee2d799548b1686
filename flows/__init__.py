"""Composition: the cycle, its Prefect form and the command line. Capabilities live in `tasks`."""
