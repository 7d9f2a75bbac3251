"""What the papers claim, tested: parts that the scripts `papers_*.py` share."""
