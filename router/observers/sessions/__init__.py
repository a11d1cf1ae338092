"""What became of each conversation: which tokens were computed again, why, and what it cost."""
