"""Names of `loadtest.simulator.arms`, for the studies that are about to go."""

from loadtest.simulator.arms import UNLIMITED, Arm, arm_of, serve_flags

__all__ = ["UNLIMITED", "Arm", "arm_of", "serve_flags"]
