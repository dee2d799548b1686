"""Rollout engines: the protocol, the in-process torch engine, the probe that proves either."""
