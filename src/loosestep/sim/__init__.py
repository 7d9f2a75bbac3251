"""Clusters nobody here has: many ranks in one process, on a virtual clock."""
