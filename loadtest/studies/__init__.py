"""Studies with the simulator: what its figures are worth, and where which policy pays."""
