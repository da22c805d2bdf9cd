"""Fine-tune a Llama of transformers from the meta device, with its own checkpointing, and save it for from_pretrained.

python examples/hf_llama.py                              # 4 simulated ranks in this process, one after the other
torchrun --nproc-per-node 2 examples/hf_llama.py         # the same program on 2 real gloo ranks

``fine_tune`` is all that a user writes. A rank never has the whole model: values start unit by unit, by the model's own
initialization, each unit is gathered when it is used, and export writes one unit at a time. With a pretrained model,
``fs.checkpoint.import_safetensors(folder, layout)`` takes the place of ``fs.init``'s parameters.
"""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from side_by_side import Row, arguments, finish, flat, nbytes, passed, ranks, train_unsharded
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, logging  # pyright: ignore[reportMissingImports]

import functorch_shard as fs

LR, SEED = 3e-3, 0
EPS = 1e-6  # transformers computes norms in float32: AdamW's own 1e-8 makes steps of the rounding of small gradients


def fine_tune(mesh: fs.Mesh, config: LlamaConfig, batches: list[Tensor], folder: Path) -> Any:
    with torch.device("meta"):  # no memory
        model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    layout = fs.plan(model, mesh)
    params, buffers = fs.init(model, layout, seed=SEED, init=model._init_weights)
    opt = fs.optimizer(torch.optim.AdamW, lr=LR, eps=EPS)

    @mesh.spmd(out_dims=(0, 0, None))
    def train_step(params: fs.Sharded, state: Any, buffers: Any, tokens: Tensor) -> Any:
        loss_of = lambda p: fs.bind(model, p, buffers)(input_ids=tokens, labels=tokens).loss  # noqa: E731
        grads, loss = fs.grad_and_value(loss_of)(params)
        return *opt.step(params, grads=grads, state=state), fs.collectives.pmean(loss, mesh)

    state, losses = opt.init(params), []
    for tokens in batches:
        params, state, loss = train_step(params, state, buffers, mesh.split(tokens))
        losses.append(loss)
    fs.checkpoint.export_safetensors(folder, params)
    if mesh.rank == 0:
        config.save_pretrained(folder)
    return params, torch.stack(losses)


def fine_tune_unsharded(config: LlamaConfig, batches: list[Tensor]) -> tuple[LlamaForCausalLM, Tensor]:
    """The same in plain torch, on the CPU and without checkpointing."""
    model = LlamaForCausalLM(config)
    torch.manual_seed(SEED)
    with torch.no_grad():
        model.apply(model._init_weights)
    return model, train_unsharded(model, lambda x: model(input_ids=x, labels=x).loss, batches, LR, EPS)[1]


def main() -> None:
    args = arguments(__doc__, steps=30, layers=4)
    mesh = ranks(args.ranks, kind="sequential")  # torch.utils.checkpoint needs ranks with a call stack of their own
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="`gradient_checkpointing_enable` is deprecated")  # its new name is of 5.x
    torch.set_default_dtype(torch.float64)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": args.layers}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False, dtype="float64")
    text = torch.frombuffer(bytearray(Path(tempfile.__file__).read_bytes()), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - 64, (args.steps, 8), generator=torch.Generator().manual_seed(0))
    batches = [text[each[:, None] + torch.arange(64)] for each in starts]

    with tempfile.TemporaryDirectory() as place:
        shared = [place]
        if dist.is_initialized():
            dist.broadcast_object_list(shared)  # all ranks pass one path
        folder = Path(shared[0]) / "llama"
        with fs.testing.count_collectives() as seen:
            params, losses = fine_tune(mesh, config, batches, folder)
        if dist.is_initialized():
            dist.barrier()
        read = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
        if dist.is_initialized():
            dist.barrier()  # the folder is the first rank's
    model, expected = fine_tune_unsharded(config, batches)
    with torch.no_grad():
        logits, wanted = (each(batches[0]).logits for each in (read, model))
    whole = {name: p.detach() for name, p in model.named_parameters()}
    rows = [
        Row("losses of all steps", losses, expected, 1e-6),  # transformers computes them, and its norms, in float32
        Row("parameters", fs.curvature.to_vector(params), flat(whole), 1e-7),
        Row("logits of what from_pretrained has read", logits, wanted, 1e-5),
    ]
    costs = {
        "loss": f"{losses[0]:.3f} at first, {losses[-1]:.3f} at last",
        "a rank passes in all": passed(seen),
        "a rank holds of parameters": f"{nbytes(params, mesh):,} bytes of {flat(whole).nbytes:,}",
    }
    finish(mesh, rows, costs)


if __name__ == "__main__":
    main()
