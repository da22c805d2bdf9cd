"""What simulated ranks cannot do because they are a vmap: torch's errors in the words of who wrote the program."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# From what torch says (2.11 to 2.13) to what it means for the function of one rank; the first that fits is taken.
_REASONS = (
    (
        r"vmap: It looks like you're (either )?(\(1\) )?(calling \.item|attempting to use a Tensor in some data-dep)",
        "a tensor was asked for its value (.item(), float(), print, an if or an assert), and every rank has its own. "
        "torch.where and arithmetic work on all of them.",
    ),
    (
        r"vmap: .*(dynamic shape|differently shaped Tensor)",
        "the shape of a result depends on values (nonzero, unique, a boolean mask), and may differ between ranks. "
        "torch.where keeps the shape.",
    ),
    (
        r"Batch norm got a batched tensor|attempted to call in-place operation .* that would mutate a captured Tensor",
        "the model writes to its buffers, as BatchNorm does, or to another tensor of its own, which all ranks share. "
        "fs.apply(model, params, buffers, x) returns new buffers instead; model.eval() only reads them.",
    ),
    (
        r"not implemented for aten::_make_dual",
        "a derivative was traced (torch.func.linearize), or forward mode asked by hand. torch.func.jvp has the same "
        "values.",
    ),
    (
        r"vmap: .* is not possible because there exists a Tensor|doesn't work on out= or view ops",
        "what differs between ranks was written into a tensor that they share. Make that tensor from one that differs, "
        "x.new_zeros(shape) and not torch.zeros(shape); a model's buffers are returned by fs.apply.",
    ),
    (
        r"don't yet support saved tensor hooks|vmap over _NoopSaveInputs",
        "hooks on saved tensors inside of a torch.func transform. The numbers are the same without them.",
    ),
    (
        r"it must override the setup_context staticmethod|but it does not have vmap support",
        "an autograd.Function without setup_context or vmap: one of the model's own, a custom op, a full backward hook "
        "of a module, or a reentrant checkpoint. One of your own takes setup_context and generate_vmap_rule = True.",
    ),
    (
        r"attempting to call Tensor\.requires_grad_",
        "autograd was asked by hand: requires_grad_() was called, for a derivative by inputs (a gradient penalty, a "
        "differential equation) or by a model of transformers that checkpoints itself. Differentiate with fs.grad or "
        "torch.func.grad: torch.func.grad(lambda x: f(x).sum())(x) is that of f by x, of any order. Recompute with "
        "fs.remat, or turn checkpointing off (model.gradient_checkpointing_disable()).",
    ),
    (
        r"backward\(\) called inside a functorch transform|attempting to call Tensor\.retain_grad",
        "autograd was asked by hand. Differentiate with fs.grad or torch.func.grad.",
    ),
    (
        r"data pointer of Tensor that doesn't have storage|Cannot access storage of BatchedTensorImpl",
        "a tensor was asked for its memory (numpy(), tolist(), a copy.deepcopy, a pickle, a kernel of its own). Return "
        "the tensor from the function, and use it outside.",
    ),
    (
        r"Cannot ask for different inplace randomness on an unbatched tensor",
        "random numbers were drawn into a tensor that all ranks share. torch.randn and torch.rand draw for each rank; "
        "make modules outside of the function.",
    ),
    (
        r"accessing `data` under vmap transform is not allowed",
        "the .data of a tensor that differs between ranks was asked for. Use x.detach().",
    ),
    (
        r"is a view and its base or another view of its base has been modified inplace",
        "a view was written to. What is written to a parameter of gather, which is a copy (under no_grad, or through "
        "detach), would be forgotten. Change the shards after the step, or gather with lazy=False to own the tensors.",
    ),
    (
        r"required rank \d tensor to use channels_last|NYI: .*memory_format",
        "a memory format was asked for, and the dims of the ranks are in front of it. Convert inputs and parameters "
        "outside of the function: a format changes no values.",
    ),
    (
        r"expected scalar type (BFloat16|Half) but found Float",
        "dtypes were mixed. If torch.autocast is on: under a vmap some operations (layer_norm) miss its casts. "
        "plan(precision=fs.MixedPrecision(...)) computes in half precision without it.",
    ),
    (
        r"Batching rule not implemented for|^vmap over .* isn't supported|^vmap: ",
        "an operation has no rule for a batch of ranks.",
    ),
)
_ADVICE = (
    "Simulated ranks are one torch.func.vmap over this function; those of simulated_mesh(..., kind='sequential') run "
    "it once for each rank, whatever it does. Real ranks run it as it is (torchrun, or in a test "
    "fs.testing.run_ranks), and so does a call without mesh.spmd: fs.grad(loss)(params, batch) with the whole batch."
)


@contextmanager
def explained(sizes: Sequence[int]) -> Iterator[None]:
    """Say why, where torch refuses what is inside because it is batched over ranks, of axes of ``sizes``; all other
    errors pass."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        reason = _reason(error, sizes)
        if reason:
            raise RuntimeError(f"spmd: {reason}\n{_ADVICE}\ntorch says: {error}") from error
        raise


def _reason(error: RuntimeError, sizes: Sequence[int]) -> str:
    text = str(error)
    if type(error) not in (RuntimeError, NotImplementedError) or text.startswith("spmd: "):
        return ""
    if _is_broadcast_of_ranks(text, sizes):
        text = "vmap: in place is not possible because there exists a Tensor"
    return next((reason for pattern, reason in _REASONS if re.search(pattern, text)), "")


def _is_broadcast_of_ranks(text: str, sizes: Sequence[int]) -> bool:
    """Whether an operation in place found the dim of an axis in its operand, and did not know it.

    That dim is missing in what is written to; or it is 1, behind the dims of axes that both have.
    """
    shapes = re.search(r"output with shape \[(.*)\] doesn't match the broadcast shape \[(.*)\]", text)
    if shapes is None:
        return False
    written, whole = ([int(size) for size in shape.split(", ") if size] for shape in shapes.groups())
    missing = len(whole) - len(written)
    if missing:
        return whole[missing:] == written and whole[missing - 1] in sizes
    differ = [i for i, (one, all_of_them) in enumerate(zip(written, whole, strict=True)) if one != all_of_them]
    return all(i < len(sizes) and written[i] == 1 and whole[i] in sizes for i in differ)
