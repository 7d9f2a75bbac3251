"""Engines: each carries a kind of strategy's decisions out, step by step. Private."""
