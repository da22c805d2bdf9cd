"""Programs of the examples, of the laws and of other libraries, each a function of a mesh that returns whole values."""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.func import functional_call

import functorch_shard as fs
from tests.laws import tasks, training
from tests.laws.wrappers import WRAPPERS
from tests.referees import training as of_libraries
from tests.referees.programs import opacus, posteriors, torchopt
from tests.referees.referee import quiet
from tests.referees.table import referees
from tests.support import launching, public_bugs
from tests.support.scripts import example

NAMES = ["maml", "dp_sgd", "influence", "lanczos", "evolution", "unit_test_your_sharding"]
maml, dp_sgd, influence, lanczos, evolution, tested = map(example, NAMES)
agents, contrastive, force_field, pinn = map(example, ["agents", "contrastive", "force_field", "pinn"])
gpt, train_gpt, muon_gpt, lora = map(example, ["gpt", "train_gpt", "muon_gpt", "lora"])
side_by_side = example("side_by_side")
production, same_bits, diloco = map(example, ["production", "same_bits", "diloco"])
long_context, moe, pipeline, schedules = map(example, ["long_context", "moe", "pipeline", "schedules"])

RANKS = 4  # on which there are the fewest samples for each
Program = Callable[[fs.Mesh], Any]


def law(mesh: fs.Mesh, task: str, wrapper: str = "plain") -> Any:
    """A derivative of the table of laws, of all samples."""
    result = tasks.on_mesh(mesh, tasks.Data(RANKS), [task], WRAPPERS[wrapper])[task]
    if isinstance(result, fs.Sharded):
        whole = tasks.whole(result, mesh.axes["replicate"])
        return {n: x.mean(0) for n, x in whole.items()} if task == "per-sample gradients, sharded" else whole
    if task == "per-sample gradients, whole":  # samples in their order
        return {n: x.flatten(0, len(mesh.axes)) for n, x in result.items()}
    return result.flatten(0, len(mesh.axes) - 1).mean(0)


def steps_of(mesh: fs.Mesh, case: str) -> Any:
    """One step of a training of the laws: the gradient, the loss and the parameters."""
    of = training.CASES[case]
    model = of.build(torch.float64)
    params, frozen = fs.partition(fs.shard(model, fs.plan(model, mesh)))
    opt = fs.optimizer(torch.optim.SGD, lr=training.LR, momentum=training.MOMENTUM)

    @mesh.spmd(out_dims=(0, 0, None))
    def step(params: fs.Sharded, frozen: fs.Sharded, state: Any, x: Tensor, y: Tensor) -> Any:
        grads, loss = fs.grad_and_value(lambda p: of.loss_of(model, fs.gather(p, frozen), x, y))(params)
        return grads, opt.step(params, grads=grads, state=state), fs.collectives.pmean(loss, mesh)

    return step(params, frozen, opt.init(params), *mesh.split(of.batches(RANKS, torch.float64)[0]))


def small(*widths: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths[:-1])]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1])).double()


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def of_digits(rows: int) -> tuple[Tensor, Tensor]:
    return torch.rand(rows, 5, generator=draw(), dtype=torch.float64), torch.randint(3, (rows,), generator=draw())


def gradient_of(mesh: fs.Mesh, model: nn.Module | fs.Sharded, gradient: Any, *batch: Tensor) -> Any:
    """The gradient, and the loss of all samples."""

    @mesh.spmd(out_dims=(0, None))
    def run(params: fs.Sharded, *batch: Tensor) -> Any:
        grads, loss = gradient(params, *batch)
        return grads, fs.collectives.pmean(loss, mesh)

    params = fs.shard(model, fs.plan(model, mesh)) if isinstance(model, nn.Module) else model
    return run(params, *mesh.split(batch))


def of_pinn(mesh: fs.Mesh) -> Any:
    points = torch.rand(8, 2, generator=draw(), dtype=torch.float64)
    model = nn.Sequential(small(2, 6, 1), nn.Flatten(0))
    return gradient_of(mesh, model, pinn.gradient(model), points)


def of_force_field(mesh: fs.Mesh) -> Any:
    torch.manual_seed(0)
    with patch.multiple(force_field, WIDTH=4, RADII=3):
        model = force_field.Energy().double()
        return gradient_of(mesh, model, force_field.gradient(model), *force_field.molecules(4, draw()))


def of_contrastive(mesh: fs.Mesh, chunks: int = 0) -> Any:
    torch.manual_seed(0)
    with patch.multiple(contrastive, SIDE=3, WORDS=2, WIDTH=4):
        model, batch = contrastive.CLIP().double(), contrastive.scenes(8, draw())
    if not chunks:
        return gradient_of(mesh, model, contrastive.gradient(mesh, model), *batch)
    run = mesh.spmd(lambda params, *batch: contrastive.grad_cache(mesh, model, params, *batch, chunks=chunks))
    return run(fs.shard(model, fs.plan(model, mesh)), *mesh.split(batch))


def of_agents(mesh: fs.Mesh) -> Any:
    torch.manual_seed(0)
    state, action, noise = torch.randn(4, 5, generator=draw(), dtype=torch.float64).split((2, 1, 2), -1)
    trees, losses = agents.train(mesh, agents.new_model(), [(state, action, *agents.push(state, action), noise)])
    return *trees, losses


def of_influence(mesh: fs.Mesh) -> Any:
    model = small(5, 4, 3)
    params = fs.shard(model, fs.plan(model, mesh))
    found, solution, _ = influence.by_shards(mesh, model, params, of_digits(8), of_digits(4), 2)
    return found[:8], solution


def of_lanczos(mesh: fs.Mesh) -> Any:
    model, (x, y) = small(5, 4, 3), of_digits(8)
    params = fs.shard(model, fs.plan(model, mesh))

    @mesh.spmd(out_dims=None)
    def spectrum(params: fs.Sharded, x: Tensor, y: Tensor) -> Any:
        loss = lambda p, x, y: nn.functional.cross_entropy(functional_call(model, fs.gather(p), (x,)), y)  # noqa: E731
        hessian = fs.curvature.hessian(loss)(params, x, y)
        return lanczos.lanczos(hessian.matvec, fs.curvature.randn_like(params, seed=1), fs.curvature.vdot, 3)[:2]

    return spectrum(params, *mesh.split((x, y)))


SMALL: dict[str, Any] = {"WIDTH": 8, "HEADS": 2, "DEPTH": 1, "CONTEXT": 9}


def of_text() -> list[tuple[Tensor, Tensor]]:
    text = torch.randint(256, (4, 10), generator=draw())
    return [(text[:, :-1], text[:, 1:])]


def of_train_gpt(mesh: fs.Mesh) -> Any:
    args = argparse.Namespace(seed=0, dropout=0.0, batch_size=4 // mesh.size, steps=2)
    text = torch.randint(256, (99,), generator=draw())
    with patch.multiple(gpt, **SMALL), patch.object(train_gpt, "CONTEXT", 9), quiet():
        return train_gpt.train(mesh, args, text, lambda _: None)[1:3]


def of_production(mesh: fs.Mesh) -> Any:
    options = {"epochs": 1, "patience": 2, "every": 20, "keep": 2, "checkpoint": "", "seed": 0}
    args = argparse.Namespace(**options, batch_size=4 // mesh.size)
    with patch.multiple(gpt, **SMALL), patch.object(production, "signal"), quiet():
        torch.manual_seed(0)
        train, valid = torch.arange(63).view(-1, 9), torch.arange(99, 135).view(-1, 9)
        job = production.train_sharded(args, mesh, production.GPT(), train, valid)
    return job["model"], job["losses"], job["valid"]


def of_hf_llama(mesh: fs.Mesh) -> Any:
    hf_llama = example("hf_llama")
    sizes = {"vocab_size": 60, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    config = hf_llama.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, use_cache=False)
    with tempfile.TemporaryDirectory() as folder, quiet():
        return hf_llama.fine_tune(
            mesh, config, 2 * [torch.randint(60, (4, 6), generator=draw())], Path(folder) / "llama"
        )


def of_muon(mesh: fs.Mesh) -> Any:
    rest = fs.optimizer(torch.optim.AdamW, lr=4e-3)
    muon = fs.optimizer(torch.optim.Muon, lr=0.02, whole=True, labels={"rest": rest})
    with patch.multiple(gpt, **SMALL), patch.multiple(muon_gpt, WIDTH=8, DEPTH=1), quiet():
        params, _, losses, _ = muon_gpt.train(mesh, muon, of_text())
    return params, losses


def of_evolution(mesh: fs.Mesh) -> Any:
    starts = torch.randn(4, 4, generator=draw(), dtype=torch.float64) * torch.tensor([0.5, 1.0, 0.12, 1.0])
    with patch.multiple(evolution, LENGTH=20, PAIRS=3):
        return evolution.evolve(mesh, small(4, 6, 1), [starts])[:2]


def of_lora(mesh: fs.Mesh) -> Any:
    torch.manual_seed(0)
    with patch.multiple(gpt, **SMALL), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = lora.adapted(gpt.GPT().double(), 2)
        adapters, base = lora.shards(mesh, model)
        parts = [(base, *mesh.split(batch)) for batch in 2 * of_text()]
        return side_by_side.train(mesh, adapters, lora.gradient(model), parts, 1e-2)[:2]


def bound(model: nn.Module, full: Any, args: Any) -> Any:
    return fs.bind(model, full)(*args)


for each in (long_context, moe):  # mutants run on sequential ranks, which share a model whose collectives wait
    each.functional_call = bound


def of_long_context(mesh: fs.Mesh, way: str) -> Any:
    torch.manual_seed(0)
    program = long_context.Program(mesh, long_context.Model().double(), getattr(long_context, way))
    tokens = torch.randint(256, (2, long_context.LENGTH), generator=draw())
    return gradient_and_losses(program, tokens, tokens.roll(-1, 1))


def of_moe(mesh: fs.Mesh) -> Any:
    torch.manual_seed(0)
    program = moe.Program(mesh, moe.Model().double())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return gradient_of(mesh, program.params, fs.grad_and_value(program.loss), *of_text()[0])


def of_pipeline(mesh: fs.Mesh, schedule: str = "") -> Any:
    torch.manual_seed(0)
    program = pipeline.Program(mesh, pipeline.new_model(), 2)
    if not schedule:
        return gradient_and_losses(program, *of_text()[0])
    ticks = getattr(schedules, schedule)(mesh.axes["stage"], 2)
    run = mesh.spmd(lambda p, *batch: schedules.gradients(program, ticks, p, *batch)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(program.params, *program.split(of_text()[0]))


def gradient_and_losses(program: Any, *batch: Tensor) -> Any:
    """The gradient of the mean loss, and the losses of all sequences."""
    mesh = program.mesh

    @mesh.spmd(out_dims=(0, None))
    def run(params: fs.Sharded, *batch: Tensor) -> Any:
        def loss(params: fs.Sharded) -> tuple[Tensor, Tensor]:
            found = program.of_rank(params, *batch)
            return found.mean(), found

        grads, found = fs.grad(loss, has_aux=True)(params)
        found = fs.collectives.pmean(found, mesh["context"]) if "context" in mesh.axes else found
        return grads, fs.collectives.all_gather(found, mesh["shard"])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # attention without a batching rule is slow
        return run(program.params, *program.split(batch))


def of_diloco(mesh: fs.Mesh, codec: str) -> Any:
    """On one rank the two workers train one after the other, in plain torch."""
    model, rounds = small(3, 5, 3), [*torch.randn(2, 2, 8, 3, generator=draw(), dtype=torch.float64)]
    if mesh.size > 1:
        return diloco.train(mesh, model, rounds, diloco.CODECS[codec])
    whole = diloco.train_unsharded(model, rounds, 2, diloco.CODECS[codec], 2)
    return {name: x.detach() for name, x in whole.items()}


def of_same_bits(mesh: fs.Mesh) -> Any:
    with patch.multiple(gpt, **SMALL), patch.multiple(same_bits, VIRTUAL_RANKS=8, LENGTH=5):
        return same_bits.train(mesh, 1)["records"]


class InMicrobatches(of_libraries.Task):
    """A task whose loss is the mean over the same microbatches on any ranks.

    So it may depend on what is in a microbatch: tokens that are no padding, a balance of experts, steps of a solver.
    """

    def on_ranks(self, model: nn.Module, params: fs.Sharded, batch: Any) -> Tensor:
        microbatches = of_libraries.parts(batch, RANKS // params.layout.num_ranks)
        return torch.stack([super(InMicrobatches, self).on_ranks(model, params, each) for each in microbatches]).mean()


def of_referee(mesh: fs.Mesh, program: Any) -> Any:
    """A step of a training of another library."""
    if getattr(program, "func", None) is of_libraries.trained:
        program = partial(program.func, InMicrobatches(**vars(program.args[0])))
    with quiet(), patch.object(of_libraries, "STEPS", 1):
        result = program(mesh)
    return {**result, "losses": [x.flatten()[0] for x in result.get("losses", ())]}


# Results that depend on how many samples a rank has, or have a dim of an ensemble in front of the shards.
NOT_WHOLE = {"gradient penalty", "ensemble", "gradients of an ensemble"}
PROGRAMS: dict[str, Program] = {
    **{f"law: {task}": partial(law, task=task) for task in tasks.ON_RANK if task not in NOT_WHOLE},
    **{
        f"law: fs.grad, {name}": partial(law, task="fs.grad", wrapper=name)
        for name in ("remat", "one parameter a unit")
    },
    **{f"training: {case}": partial(steps_of, case=case) for case in training.CASES},
    **{f"repaired: {name}": partial(public_bugs.whole, name=name, wrong=False) for name in public_bugs.BUGS},
    "example: unit_test_your_sharding": tested.first_step,
    "example: maml": lambda mesh: maml.train(mesh, small(1, 6, 1), [maml.sines(draw(), 8)])[0],
    "example: pinn": of_pinn,
    "example: force_field": of_force_field,
    "example: contrastive": of_contrastive,
    "example: contrastive, GradCache": partial(of_contrastive, chunks=2),
    "example: agents": of_agents,
    "example: dp_sgd": lambda mesh: dp_sgd.train(mesh, small(5, 6, 3), of_digits(8), 0.5, 1)[0],
    "example: influence": of_influence,
    "example: lanczos": of_lanczos,
    "example: evolution": of_evolution,
    "example: train_gpt": of_train_gpt,
    "example: same_bits": of_same_bits,
    "example: diloco": partial(of_diloco, codec="none"),
    "example: diloco, int8": partial(of_diloco, codec="int8"),
    "example: production": of_production,
    "example: muon_gpt": of_muon,
    "example: lora": of_lora,
    "example: launch/train": partial(launching.PROGRAM["train"], steps=3),
    "example: long_context, ring": partial(of_long_context, way="ring"),
    "example: long_context, ulysses": partial(of_long_context, way="ulysses"),
    "example: moe": of_moe,
    "example: pipeline": of_pipeline,
    "example: pipeline, 1F1B": partial(of_pipeline, schedule="one_f_one_b"),
}
AXES = {  # of others: one, replicate, shard
    "example: long_context": ("shard", "context"),
    "example: moe": ("expert", "shard"),
    "example: pipeline": ("stage", "shard"),
    "example: production": ("shard",),
    "example: diloco": ("worker", "shard"),
    "referee: torchopt": ("replicate", "shard"),
}
if find_spec("transformers"):
    PROGRAMS["example: hf_llama"] = of_hf_llama
SEQUENTIAL = {"example: hf_llama", "example: same_bits"}  # programs that batched ranks refuse
FLOAT32 = {"example: hf_llama"}  # programs that compute norms or losses in it
TRAININGS = (of_libraries.trained, torchopt.optimized, torchopt.maml, opacus.private_step, posteriors.sampled)
BY_HAND = ("torchebm", "deepxde", "pina")  # they call requires_grad_() for each microbatch: vmap lets them once
for each in referees():
    training_of = getattr(each.program, "func", each.program) in TRAININGS
    if each.installed and training_of and not each.refused:
        PROGRAMS[f"referee: {each}"] = partial(of_referee, program=each.program)
        SEQUENTIAL |= {f"referee: {each}"} if each.batched or each.package in BY_HAND else set()
        in_float32 = each.tolerance > 1e-8 or each.package in ("transformers", "peft")
        FLOAT32 |= {f"referee: {each}"} if in_float32 else set()
# What the types of a right program tell. DiLoCo's workers have moments of their own, of which others would be copies.
TOLD = {"example: diloco": r"exp_avg.* varies over worker"}
# Mutants that are the program: a pattern of its name, one of the mutant, and why.
PLACED = "example: (train_gpt|production|moe|long_context|pipeline)"  # the first gather is that of positions
COUNTED = "of a step that is run to count what it sends, and thrown away"
EQUIVALENT = [
    ("law", r"of \d+ bool .*: doubled", "twice a bool is that bool"),
    ("law: value", r"psum", "the gradient is thrown away"),
    ("law: forward over", r"(1[3579]|2[13579]|31), psum", "of a gradient whose tangent alone is returned"),
    ("law: reverse over reverse", r"(8|9|1[0-8]), psum", "of a gradient whose derivative alone is returned"),
    ("law: reverse over reverse", r"19, psum .* over 'replicate'$", "the cotangent is one on every rank"),
    ("law: gradient of a mean", r"[89], psum", "the mean itself is thrown away"),
    ("law: gradient of a mean", r"1[01], psum .* over '\w+': over", "the cotangent is one on every rank"),
    ("law: fs.grad, remat", r" [0-7], all_gather", "of a forward whose value is thrown away: backward gathers again"),
    ("law: fs.grad, one parameter a unit", r"of 0 float64", "of no elements"),
    ("law: fs.grad, one parameter a unit", r"all_gather .*norm.bias", "a bias of a normalization is zeros at first"),
    ("example: maml", r" [0-5], ", COUNTED),
    ("example: dp_sgd", r" [0-7], ", COUNTED),
    ("example: influence", r"3[23], psum of 1 ", "of the direction after the last step, which no step uses"),
    ("example: lanczos", r" (5|7|9|11|2[2468]|4[1357]), psum", "of a gradient whose tangent alone is returned"),
    ("example: lanczos", r" (14|15|3[1-4]), psum .*doubled", "the second pass takes away what the first one left"),
    ("example: lanczos", r" 5[0-7], psum", "of the vector after the last step, which no step uses"),
    ("example: evolution", r" [0-7], ", COUNTED),
    ("example: launch/train", r" (1[89]|2[01]), psum", "of the parameters after the last step, which are not returned"),
    ("example: muon_gpt", r" ([0-9]|1[0-9]|2[0-4]), ", COUNTED),
    ("example: muon_gpt", r"psum.* for 'blocks.0' over .*: doubled", "a first step of Muon goes by direction"),
    ("example: muon_gpt", r" 25, all_gather .*'.root./rest'", "positions are zeros at first"),
    ("example: hf_llama", r" 3, all_gather .*: (dropped|over)", "the weights of a normalization are ones at first"),
    ("example: same_bits", r" (0|12), all_gather .*'.root.'", "positions are zeros at first"),
    (PLACED, r" 0, all_gather .*'.root.'", "positions are zeros at first"),
    ("example: production", r"pmax", "no rank is told to end"),
    ("example: lora", r" ([0-9]|1[01]), ", COUNTED),
    ("example: lora", r" (12|24), all_gather .*'.root./frozen'", "positions are zeros at first"),
    ("example: lora", r" (16|28), all_gather .*: (dropped|over)", "the weights of a normalization are ones at first"),
    ("example: agents", r" ([7-9]|10), all_gather", "of targets but for those of critics, which no loss uses"),
    ("GradCache", r" [25], all_gather .*: doubled", "embeddings are normalized"),
    ("GradCache", r" (14|32), all_gather", "the surrogate is linear in the temperature"),
    ("example: moe", r" 1[78], psum .* over '\w+': over", "the cotangent is one on every rank"),
    ("example: pipeline$", r" 9, psum .* over '\w+': over", "the cotangent is one on every rank"),
    ("example: pipeline, 1F1B", r" 10, psum", "the loss itself is thrown away"),
    ("referee: normflows", r" 0, all_gather .*'model.q0'", "the mean and the scale of a Gaussian are zeros at first"),
    ("referee", r" [356], all_gather .*norm.*: (dropped|over)", "the weights of a normalization are ones at first"),
]
