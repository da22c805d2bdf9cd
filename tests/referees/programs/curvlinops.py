"""Products of curvlinops' operators of a plain model, and its estimators on ours."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from functorch_shard.curvature import Operator
from tests.referees.programs.curvature import data, direction, made, operator
from tests.referees.referee import Referee, Where, of_all

THEIRS = {"hessian": "HessianLinearOperator", "gauss_newton": "GGNLinearOperator", "fisher": "EFLinearOperator"}


def theirs(kind: str) -> Any:
    model = made()
    make = getattr(import_module("curvlinops"), THEIRS[kind])
    return make(model, nn.CrossEntropyLoss(), list(model.parameters()), [data()])


def product(where: Where, kind: str) -> dict[str, Any]:
    matrix = theirs(kind) if isinstance(where, int) else operator(kind, where)
    return of_all({"product": matrix @ direction(matrix.shape[0])})


def adapter(made: Operator) -> Any:
    """Our operator as one of theirs: products with the columns of a matrix."""
    base = import_module("curvlinops._torch_base").PyTorchLinearOperator

    class Adapter(base):
        SELF_ADJOINT = True
        device, dtype = torch.device("cpu"), torch.float64

        def _matmat(self, columns: list[Tensor]) -> list[Tensor]:
            return [torch.stack([made @ column for column in columns[0].unbind(-1)], -1)]

        def _infer_device(self) -> torch.device:
            return self.device

        def _infer_dtype(self) -> torch.dtype:
            return self.dtype

    n = made.shape[0]
    return Adapter([(n,)], [(n,)])


def estimates(where: Where) -> dict[str, Any]:
    """Trace and extreme eigenvalues by their estimators, which draw the same numbers on every rank."""
    matrix = theirs("hessian") if isinstance(where, int) else adapter(operator("hessian", where))
    library = import_module("curvlinops")
    torch.manual_seed(0)
    values = [library.hutchinson_trace(matrix, 20), library.hutchpp_trace(matrix, 30), library.xtrace(matrix, 20)]
    spectrum = import_module("curvlinops.papyan2020traces.spectrum").fast_lanczos(matrix, 12)
    return of_all({"traces": values, "eigenvalues": spectrum[0]})


REFEREES = [
    *(Referee("curvlinops", f"{THEIRS[kind]} @ v", partial(product, kind=kind)) for kind in THEIRS),
    Referee("curvlinops", "traces and Lanczos on our Hessian", estimates, tolerance=1e-8),
]
