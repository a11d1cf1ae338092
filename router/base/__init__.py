"""What every room may use: errors, addresses, decoding, back-off, logs, messages."""
