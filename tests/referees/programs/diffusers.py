"""The U-Net of diffusers: trained, with its own checkpointing, and with tangents of sample and time."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, jvp

from tests.referees.referee import Referee, Where
from tests.referees.training import Batch, Task, rows_of, trained

KINDS = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
PLAIN = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2, "add_attention": False}
SIZES = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}


def unet(attention: bool = True) -> Any:
    library = import_module("diffusers")
    library.utils.logging.set_verbosity_error()
    return library.UNet2DModel(**(KINDS if attention else PLAIN), **SIZES, attention_head_dim=8)


def noisy() -> Batch:
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {"sample": x, "timestep": torch.tensor([3.0, 141.0, 592.0, 653.0], dtype=torch.float64)}


def of_output(output: Any) -> Tensor:
    return output.sample.square().mean()


def velocity(where: Where) -> dict[str, Any]:
    """The derivative of the output along a direction of sample and time, as losses of mean flows need it."""
    model = Task(partial(unet, attention=False), noisy, of_output).made()  # torch's attention has no forward mode here

    def tangent(full: Any, sample: Tensor, timestep: Tensor) -> Tensor:
        at = lambda x, t: functional_call(model, full, (x, t)).sample  # noqa: E731
        return jvp(at, (sample, timestep), (torch.ones_like(sample), torch.ones_like(timestep)))[1]

    return {"each tangent": rows_of(where, model, noisy(), tangent)}


CHECKPOINTING = Task(unet, noisy, of_output, "enable_gradient_checkpointing")
REFEREES = [
    Referee("diffusers", "UNet2D", partial(trained, Task(unet, noisy, of_output))),
    Referee("diffusers", "UNet2D, checkpointing", partial(trained, CHECKPOINTING), batched="saved tensor hooks"),
    Referee("diffusers", "UNet2D, jvp by sample and time", velocity),
]
