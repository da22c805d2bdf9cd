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
    moe, gpt = import_module("moe"), import_module("gpt")
    text, generator = gpt.read_text(None)[0], torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model, found = moe.Model(balance=balance), []
    opt = torch.optim.AdamW(model.parameters(), lr=moe.LR)
    for _ in range(STEPS):
        starts = torch.randint(len(text) - moe.LENGTH, (BATCH, 1), generator=generator)
        tokens = text[starts + torch.arange(moe.LENGTH)].long()
        loss = model.loss(dict(model.named_parameters()), tokens, moe.on_whole_tensors, lambda x: x)
        with torch.no_grad():
            _, routings = model(tokens, moe.on_whole_tensors)
        load = routings[-1].chosen.mean((0, 1)) / moe.CHOSEN
        dropped = 1 - sum(x.places.sum() for x in routings) / sum(x.chosen.sum() for x in routings)
        opt.zero_grad()
        loss.backward()
        opt.step()
        found.append({"load": [round(x, 4) for x in load.tolist()], "dropped": round(dropped.item(), 4)})
    return found


if __name__ == "__main__":
    sys.path.append(str(ROOT / "examples"))
    result = {str(balance): loads(balance) for balance in (0.0, 0.01)}
    (ROOT / "docs" / "_static" / "moe.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
