"""Studies: what the simulator's figures are worth, where which policy pays, what a fleet costs."""
