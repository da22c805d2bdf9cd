"""Curvature: operators, Jacobians, and trees as vectors."""
