"""Optimizers of schedulefree."""

from __future__ import annotations

from tests.referees.programs.pytorch_optimizer import of

MODES = "it has a train mode and an eval mode with different parameters, and a pure step has no modes"
REFEREES = [
    *(of(kind, "schedulefree", MODES, lr=0.05) for kind in ("AdamWScheduleFree", "SGDScheduleFree")),
    of("AdamWScheduleFree", "schedulefree", MODES, whole=True, lr=0.05),
]
