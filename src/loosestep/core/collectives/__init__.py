"""Collective communication: groups of ranks on torch.distributed. Private."""
