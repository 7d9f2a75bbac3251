"""Peers that misbehave on purpose, to see that the harness notices."""
