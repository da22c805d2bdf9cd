"""The smallest training of other libraries: flows, equations, force fields, graphs, contrastive losses."""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import functorch_shard as fs
from tests.referees.referee import Referee, Where
from tests.referees.training import Calling, Task, parts, rows_of, trained, trained_by_fsdp2


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(4, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(length: int, seed: int = 1) -> Tensor:
    return torch.randint(1, 20, (4, length), generator=torch.Generator().manual_seed(seed))


# Flows


def zuko() -> nn.Module:
    flow = import_module("zuko").flows.NSF(3, transforms=2, hidden_features=(8, 8))
    return Calling(flow, lambda flow, x: -flow().log_prob(x).mean())


def normflows() -> nn.Module:
    nf = import_module("normflows")
    layers = []
    for mask in (torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 0.0])):
        layers += [nf.flows.MaskedAffineFlow(mask, nf.nets.MLP([3, 8, 3]), nf.nets.MLP([3, 8, 3]))]
    flow = nf.NormalizingFlow(nf.distributions.DiagGaussian(3), layers)
    return Calling(flow, lambda flow, x: flow.forward_kld(x))


# Equations: derivatives by inputs, inside of the loss


def deepxde() -> nn.Module:
    os.environ["DDE_BACKEND"] = "pytorch"
    dde = import_module("deepxde")

    def residual(net: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = net(x)
        hessian = dde.grad.hessian(y, x)
        dde.grad.clear()
        return (hessian + y.sin()).square().mean()

    return Calling(dde.nn.FNN([1, 8, 8, 1], "tanh", "Glorot normal"), residual)


def pina() -> nn.Module:
    package, operator = import_module("pina"), import_module("pina.operator")

    def residual(net: Any, x: Tensor) -> Tensor:
        points = package.LabelTensor(x.detach(), ["x", "y"]).requires_grad_()
        u = net(points)
        u.labels = ["u"]
        return (operator.laplacian(u, points, components=["u"], d=["x", "y"]).as_subclass(Tensor) - 1).square().mean()

    return Calling(import_module("pina.model").FeedForward(2, 1, inner_size=8, n_layers=2), residual)


def neuralop() -> nn.Module:
    fno = import_module("neuralop.models").FNO(
        n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2
    )
    for p in filter(torch.is_complex, fno.parameters()):
        p.data = p.data.to(torch.complex128)
    return Calling(fno, lambda net, x: (net(x) - x.square()).square().mean())


# Force fields: derivatives by positions, inside of the loss

ATOMS = 4
PAIRS = torch.tensor([[i, j] for i in range(ATOMS) for j in range(ATOMS) if i != j]).T


KINDS = torch.tensor([0, 1] * (ATOMS // 2))


def molecule_of_atoms(number: int) -> Tensor:
    return torch.arange(number).repeat_interleave(ATOMS)


def pairs(number: int) -> Tensor:
    """Each two atoms of a molecule."""
    return (PAIRS[:, None] + ATOMS * torch.arange(number)[:, None]).flatten(1)


def energy_and_forces(energy: Tensor, forces: Tensor, e: Tensor, f: Tensor) -> Tensor:
    return (energy.flatten() - e.flatten()).square().mean() + (forces.reshape(f.shape) - f).square().mean()


def torchmdnet() -> nn.Module:
    make = import_module("torchmdnet.models.model").create_model
    sizes = {"embedding_dimension": 8, "num_layers": 1, "num_rbf": 6, "num_heads": 2, "max_z": 10, "precision": 64}
    radii = {"cutoff_lower": 0.0, "cutoff_upper": 5.0, "max_num_neighbors": 8, "rbf_type": "expnorm", "box_vecs": None}
    names = {"model": "equivariant-transformer", "activation": "silu", "attn_activation": "silu", "aggr": "add"}
    other = {"distance_influence": "both", "output_model": "Scalar", "reduce_op": "add", "prior_model": None}
    flags = ("trainable_rbf", "vector_cutoff", "check_errors", "remove_ref_energy")
    on = {"derivative": True, "static_shapes": True, "neighbor_embedding": True}
    args = {**sizes, **radii, **names, **other, **dict.fromkeys(flags, False), **on, "atom_filter": -1}

    def loss(model: Any, x: Tensor, e: Tensor, f: Tensor) -> Tensor:
        energy, forces = model(1 + KINDS.repeat(len(x)), x.flatten(0, 1).clone(), molecule_of_atoms(len(x)))
        return energy_and_forces(energy, forces, e, f)

    return Calling(make(args), loss)


def nequip() -> nn.Module:
    import_module("nequip.utils.global_state").set_global_state(allow_tf32=False)
    sizes = {"num_layers": 1, "l_max": 1, "num_features": 4, "radial_mlp_width": 8, "num_bessels": 4, "r_max": 4.0}
    options = {"avg_num_neighbors": 3.0, "compile_mode": "eager", "model_dtype": "float64"}
    model = import_module("nequip.model").NequIPGNNModel(seed=0, type_names=["H", "O"], **sizes, **options)

    def loss(model: Any, x: Tensor, e: Tensor, f: Tensor) -> Tensor:
        atoms = {"pos": x.flatten(0, 1), "atom_types": KINDS.repeat(len(x)), "batch": molecule_of_atoms(len(x))}
        graph = {"edge_index": pairs(len(x)), "num_atoms": torch.full((len(x),), ATOMS)}
        out = model({**atoms, **graph})
        return energy_and_forces(out["total_energy"], out["forces"], e, f)

    return Calling(model, loss)


def mace() -> nn.Module:
    with torch.serialization.safe_globals([slice]):  # e3nn 0.4 loads its constants when it is imported
        irreps = import_module("e3nn.o3").Irreps
    modules = import_module("mace.modules")
    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    sizes = {"r_max": 4.0, "num_bessel": 4, "num_polynomial_cutoff": 3, "max_ell": 2, "correlation": 2}
    layers = {"num_interactions": 2, "interaction_cls": block, "interaction_cls_first": block}
    kinds = {"num_elements": 2, "atomic_numbers": [1, 8], "atomic_energies": numpy.zeros(2), "avg_num_neighbors": 3.0}
    widths = {"hidden_irreps": irreps("4x0e + 4x1o"), "MLP_irreps": irreps("4x0e"), "gate": nn.functional.silu}
    scale = {"atomic_inter_scale": 1.0, "atomic_inter_shift": 0.0}

    def loss(model: Any, x: Tensor, e: Tensor, f: Tensor) -> Tensor:
        edges, cells = pairs(len(x)), 20 * torch.eye(3, dtype=x.dtype).repeat(len(x), 1)
        shifts = {"shifts": x.new_zeros(edges.shape[1], 3), "unit_shifts": x.new_zeros(edges.shape[1], 3)}
        atoms = {"positions": x.flatten(0, 1).clone(), "node_attrs": torch.eye(2, dtype=x.dtype)[KINDS.repeat(len(x))]}
        where = {"batch": molecule_of_atoms(len(x)), "ptr": ATOMS * torch.arange(len(x) + 1)}
        out = model({**atoms, **where, **shifts, "edge_index": edges, "cell": cells}, training=True)
        return energy_and_forces(out["energy"], out["forces"], e, f)

    return Calling(modules.ScaleShiftMACE(**sizes, **layers, **kinds, **widths, **scale), loss)


# Others


def torch_geometric() -> nn.Module:
    gcn = import_module("torch_geometric.nn").GAT(3, 8, 2, 1, heads=2)

    def loss(net: Any, x: Tensor, y: Tensor) -> Tensor:
        return (net(x.flatten(0, 1), pairs(len(x))) - y.flatten(0, 1)).square().mean()

    return Calling(gcn, loss)


def torchtitan(family: str, name: str) -> nn.Module:
    """Its smallest model of a family, with the attention of its image models: others need compiled kernels or a GPU."""
    attention = import_module("torchtitan.models.common.attention").ScaledDotProductAttention
    config = getattr(import_module(f"torchtitan.models.{family}"), f"{family}_configs")[name]("flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = attention.Config()
        if layer.moe:
            layer.moe.routed_experts.inner_experts.hidden_dim = 16
    net = config.build()
    net.init_weights()
    loss = lambda net, x: nn.functional.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())  # noqa: E731
    return Calling(net, loss)


def x_transformers() -> nn.Module:
    x = import_module("x_transformers")
    net = x.TransformerWrapper(
        num_tokens=20, max_seq_len=8, attn_layers=x.Decoder(dim=8, depth=2, heads=2, rotary_pos_emb=True)
    )
    return Calling(x.AutoregressiveWrapper(net), lambda net, x: net(x))


def denoising() -> nn.Module:
    ddp = import_module("denoising_diffusion_pytorch")
    unet = ddp.Unet(8, dim_mults=(1, 2), channels=1, flash_attn=False)
    net = ddp.GaussianDiffusion(unet, image_size=8, timesteps=10)
    return Calling(net, lambda net, x, t, noise: net.p_losses(x, t, noise=noise))


def open_clip() -> nn.Module:
    package = import_module("open_clip")
    net = package.CLIP(
        8,
        {"layers": 1, "width": 16, "head_width": 8, "patch_size": 4, "image_size": 8},
        {"context_length": 6, "vocab_size": 20, "width": 16, "heads": 2, "layers": 1},
    )
    return Calling(net, lambda net, image, text: package.ClipLoss()(*net(image, text)))


def sentence_transformers(loss: str, **options: Any) -> nn.Module:
    package, bert = import_module("sentence_transformers.sentence_transformer"), import_module("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    words = bert.BertModel(bert.BertConfig(**sizes, **none, intermediate_size=12), add_pooling_layer=False)
    embed = lambda words, f: {**f, "token_embeddings": words(f["input_ids"], f["attention_mask"])[0]}  # noqa: E731
    layers = [Calling(words, embed), package.modules.Pooling(8)]
    net = import_module("sentence_transformers").SentenceTransformer(modules=layers, device="cpu")

    def both(net: Any, **texts: Tensor) -> Tensor:
        features = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in texts.values()]
        return getattr(package.losses, loss)(net, **options)(features, torch.zeros(()))

    return Calling(net, both)


# What takes whole parameters


def of_rank(explain: Any, where: Where) -> dict[str, Any]:
    """What a library computes on each rank from a model with whole parameters and the rank's data."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    batch = {"x": draw(3), "y": draw(2, seed=2)}
    return {"each rank": rows_of(where, net, batch, lambda full, x, y: explain(bound(net, full), x, y))}


def bound(net: nn.Module, full: Any) -> nn.Module:
    """With parameters that such libraries may call ``backward()`` for."""
    return fs.bind(net, {name: nn.Parameter(x.detach().clone()) for name, x in full.items()})


def captum(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Integrated gradients."""
    return import_module("captum.attr").IntegratedGradients(net).attribute(x, target=1, n_steps=5).detach()


def laplace(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The diagonal of the generalized Gauss-Newton matrix."""
    found = import_module("laplace").Laplace(net, "regression", subset_of_weights="all", hessian_structure="diag")
    found.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=1))
    return found.H.detach()


def by_backward(make: Any, batch: Any, where: Where) -> dict[str, Any]:
    """The gradient by ``backward()``, for a loss whose hook calls it."""
    model = Task(make, batch).made()
    if isinstance(where, int):
        torch.stack([model(**part) for part in parts(batch(), where)]).mean().backward()
        return {"gradient": {name: p.grad for name, p in model.named_parameters()}}
    params = fs.shard(model, fs.plan(model, where))

    @where.spmd
    def gradient(params: fs.Sharded, batch: Any) -> fs.Sharded:
        leaves = fs.Sharded({key: x.detach().requires_grad_() for key, x in params.items()}, params.layout)
        fs.bind(model, fs.gather(leaves, lazy=True))(**batch).backward()  # the hook calls it for each part of a batch
        return fs.Sharded({key: x.grad for key, x in leaves.items()}, params.layout)

    return {"gradient": fs.gather(gradient(params, where.split(dict(batch()))), lazy=False)}


def dattri(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The influence of each sample on each other one, by a regularized Hessian."""
    influence, data = import_module("dattri.algorithm"), torch.utils.data
    loss = lambda params, batch: (torch.func.functional_call(net, params, batch[0]) - batch[1]).square().mean()  # noqa: E731
    task = import_module("dattri.task").AttributionTask(loss, net, net.state_dict())
    samples = data.DataLoader(data.TensorDataset(x, y), batch_size=len(x))
    attributor = influence.IFAttributorExplicit(task, regularization=1.0)
    attributor.cache(samples)
    return attributor.attribute(samples, samples)


def kronfluence(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The influence of each sample on each other one, by factors of the Hessian."""
    package = import_module("kronfluence")

    class Squares(package.Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            return (model(batch[0]) - batch[1]).square().sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    task, data = Squares(), torch.utils.data.TensorDataset(x, y)
    with TemporaryDirectory() as folder:
        model = package.prepare_model(net, task)
        analyzer = package.Analyzer("net", model, task, cpu=True, output_dir=folder, disable_tqdm=True)
        analyzer.fit_all_factors("factors", data, per_device_batch_size=2)
        sizes = {"per_device_query_batch_size": 2, "per_device_train_batch_size": 2}
        analyzer.compute_pairwise_scores("scores", "factors", data, data, **sizes)
        return analyzer.load_pairwise_scores("scores")["all_modules"]


def of(package: str, name: str, model: Any, batch: Any, **options: Any) -> Referee:
    task = Task(model, batch, bound=True, dropout=True)  # they have none, and nequip a "p" of its own
    return Referee(package, name, partial(trained, task), fsdp2=partial(trained_by_fsdp2, task), **options)


points, line, plane, images = (partial(dict, x=draw(*shape)) for shape in ((3,), (1,), (2,), (1, 8, 8)))
molecules = partial(dict, x=draw(ATOMS, 3), e=draw(1, seed=2), f=draw(ATOMS, 3, seed=3))
graphs = partial(dict, x=draw(ATOMS, 3), y=draw(ATOMS, 1, seed=2))
text = partial(dict, x=tokens(7))
noised = partial(dict, x=draw(1, 8, 8), t=torch.tensor([1, 3, 5, 7]), noise=draw(1, 8, 8, seed=2))
words, others = torch.cat([tokens(6), tokens(6, 3)]), torch.cat([tokens(6, 5), tokens(6, 7)])
captions = partial(dict, image=torch.cat([draw(3, 8, 8), draw(3, 8, 8, seed=5)]), text=words)
texts = partial(dict, one=words, other=others)
MNRL = partial(sentence_transformers, "MultipleNegativesRankingLoss")
CACHED = partial(sentence_transformers, "CachedMultipleNegativesRankingLoss", mini_batch_size=2)
WRITTEN, READ, DRAWN = "inplace arithmetic", "data-dependent control flow", "inplace randomness"  # of batched ranks
REFEREES = [
    of("zuko", "neural spline flow", zuko, points),
    of("normflows", "RealNVP", normflows, points, batched="broadcast shape"),
    of("deepxde", "equation with a second derivative", deepxde, line),
    of("pina", "Poisson's equation", pina, plane),
    of("neuralop", "FNO", neuralop, images, batched=WRITTEN),
    of("torchmdnet", "equivariant transformer, forces", torchmdnet, molecules, batched="setup_context"),
    of("nequip", "energies and forces", nequip, molecules, batched="scatter_add_"),
    of("mace", "energies and forces", mace, molecules, batched="scatter_add_"),
    of("torch_geometric", "GAT", torch_geometric, graphs),
    of("torchtitan", "Llama 3", partial(torchtitan, "llama3", "debugmodel"), text, tolerance=1e-6),
    of(
        "torchtitan",
        "Qwen3-MoE",
        partial(torchtitan, "qwen3", "debugmodel_moe"),
        text,
        tolerance=1e-6,
        batched="broadcast shape",
    ),
    of("x_transformers", "decoder", x_transformers, text),
    of("denoising_diffusion_pytorch", "U-Net of a diffusion", denoising, noised),
    of("open_clip", "CLIP", open_clip, captions),
    of("sentence_transformers", "MNRL", MNRL, texts, batched=READ),
    of("sentence_transformers", "MNRL, cached", CACHED, texts, batched=READ, refused="is not an argument has a hook"),
    Referee(
        "sentence_transformers",
        "MNRL, cached, by backward()",
        partial(by_backward, CACHED, texts),
        batched="requires_grad_",
    ),
    Referee("captum", "integrated gradients", partial(of_rank, captum), batched="requires_grad_"),
    Referee("dattri", "influence by the Hessian", partial(of_rank, dattri), batched=DRAWN),
    Referee("kronfluence", "influence by Kronecker factors", partial(of_rank, kronfluence), batched=DRAWN),
    Referee("laplace", "diagonal of Gauss-Newton", partial(of_rank, laplace), batched=DRAWN),
]
