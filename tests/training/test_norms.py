"""Norms on simulated and on gloo ranks: those of whole tensors by torch itself, with one number sent."""

from __future__ import annotations
