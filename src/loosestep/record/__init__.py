"""Record and replay: what an asynchronous run did, written down and played again."""
