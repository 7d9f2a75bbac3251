"""Predictions of speed on clusters that nobody has: clocks instead of tensors."""
