"""Trainers of others: each needs only to be kept from wrapping the model in DDP over all ranks."""
