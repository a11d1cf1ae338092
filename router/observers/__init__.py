"""What only watches requests: a folder each. None imports another, and the path imports none."""
