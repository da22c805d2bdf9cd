"""Clipping on simulated and on gloo ranks: that of torch on whole tensors, and of FSDP2."""

from __future__ import annotations
