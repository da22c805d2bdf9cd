"""What docs/_static/moe.svg shows: ``python docs/expert_loads.py`` trains examples/moe.py, with and without balance."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
STEPS, BATCH = 150, 16


def loads(balance: float) -> list[dict[str, Any]]:
    """Of each step: the part of tokens of each expert of the last layer, and of choices without a place in any."""
    moe, mixture, gpt = map(import_module, ("moe", "mixture", "gpt"))
    text = gpt.read_text(None)[0]
    torch.manual_seed(0)
    model, found = moe.Model(balance=balance), []
    opt = torch.optim.AdamW(model.parameters(), lr=moe.LR)
    for x, y in gpt.batches(text, STEPS, BATCH):
        logits, means = model(x)
        loss = model.loss((logits, means), y)
        load = means.detach()[-1, 1] / mixture.CHOSEN
        dropped = 1 - means.detach()[:, 2].sum() / means.detach()[:, 1].sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        found.append({"load": [round(x, 4) for x in load.tolist()], "dropped": round(dropped.item(), 4)})
    return found


if __name__ == "__main__":
    sys.path.append(str(ROOT / "examples"))
    result = {str(balance): loads(balance) for balance in (0.0, 0.01)}
    (ROOT / "docs" / "_static" / "moe.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
