"""The tensors of one rank: snapshots, folds, staging between devices, shards. Private."""
