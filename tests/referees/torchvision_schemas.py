"""Let torchvision's wheel on PyPI be imported beside a build of torch for CPUs: it has kernels for CUDA builds alone.

Without them torchvision declares what these operators compute and fails, since nothing has declared the operators
themselves; and with it timm and transformers fail. The programs here use none of them. Wheels for CPUs ("+cpu") are
left alone.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

import torch

SCHEMAS = ("nms", "qnms")


def declared() -> torch.library.Library | None:
    """What holds the declarations, if any are needed."""
    if not find_spec("torchvision") or torch.version.cuda is not None or "+" in version("torchvision"):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in SCHEMAS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
