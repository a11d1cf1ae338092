"""The sessions' ledger."""
