"""Rollouts to and from other frameworks: exports they can read, imports of what they write."""
