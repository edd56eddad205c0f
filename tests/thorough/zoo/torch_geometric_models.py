"""Architectures of PyTorch Geometric on small random graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric import nn as gnn

from tests.thorough.zoo.play import listed

__all__ = ["ARCHITECTURES"]

FEATURES, CLASSES, NODES = 12, 4, 20


def _graph() -> tuple[Tensor, Tensor]:
    return torch.randn(NODES, FEATURES), torch.randint(NODES, (2, 60))


def _nodes(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(*_graph()), torch.randint(CLASSES, (NODES,)))


def _relations(model: nn.Module) -> Tensor:
    nodes, edges = _graph()
    return F.cross_entropy(model(nodes, edges, torch.randint(3, (60,))), torch.randint(CLASSES, (NODES,)))


class _Whole(nn.Module):
    """Layers, and one value for a graph."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(), layer()])
        self.norm = gnn.GraphNorm(FEATURES)
        self.pool = gnn.SAGPooling(FEATURES, ratio=0.5)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(self.norm(layer(x, edges)).relu(), 0.1, self.training)
        x, _, _, batch, _, _ = self.pool(x, edges)
        return self.head(gnn.global_mean_pool(x, batch)).expand(NODES, CLASSES)


class _Relational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = gnn.RGCNConv(FEATURES, FEATURES, 3, num_bases=2)
        self.second = gnn.FastRGCNConv(FEATURES, CLASSES, 3)

    def forward(self, x: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
        return self.second(self.first(x, edges, kinds).relu(), edges, kinds)


class _Heterogeneous(nn.Module):
    """Two kinds of nodes, with layers by the kind of edge."""

    def __init__(self) -> None:
        super().__init__()
        there, back = ("user", "buys", "item"), ("item", "bought_by", "user")
        self.embed = nn.ModuleDict({"user": nn.Embedding(NODES, FEATURES), "item": nn.Embedding(NODES, FEATURES)})
        self.layers = nn.ModuleList(
            gnn.HeteroConv(
                {there: gnn.SAGEConv(FEATURES, FEATURES), back: gnn.GATConv(FEATURES, FEATURES, add_self_loops=False)}
            )
            for _ in range(2)
        )
        self.head = gnn.HeteroDictLinear(FEATURES, CLASSES, ["user", "item"])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        nodes = {name: embed.weight + x for name, embed in self.embed.items()}
        kinds = {("user", "buys", "item"): edges, ("item", "bought_by", "user"): edges.flip(0)}
        for layer in self.layers:
            nodes = {name: value.relu() for name, value in layer(nodes, kinds).items()}
        found: Tensor = self.head(nodes)["item"]
        return found


_STACK = {"in_channels": FEATURES, "hidden_channels": 8, "num_layers": 2, "out_channels": CLASSES, "dropout": 0.1}


def _linear(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inside, outside), nn.ReLU(), nn.Linear(outside, outside))


_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "GCN": (partial(gnn.GCN, **_STACK), _nodes),
    "GraphSAGE": (partial(gnn.GraphSAGE, **_STACK), _nodes),
    "GAT": (partial(gnn.GAT, **_STACK, heads=2), _nodes),
    "GATv2": (partial(gnn.GAT, **_STACK, v2=True), _nodes),
    "GIN": (partial(gnn.GIN, **_STACK), _nodes),
    "PNA": (
        partial(
            gnn.PNA,
            **_STACK,
            aggregators=["mean", "max"],
            scalers=["identity", "amplification"],
            deg=torch.tensor([1, 4, 6, 9]),
        ),
        _nodes,
    ),
    "EdgeCNN": (partial(gnn.EdgeCNN, **_STACK), _nodes),
    "DeepGCN layers": (
        lambda: _Whole(
            lambda: gnn.DeepGCNLayer(gnn.GENConv(FEATURES, FEATURES), nn.LayerNorm(FEATURES), nn.ReLU(), dropout=0.1)
        ),
        _nodes,
    ),
    "Transformer convolution": (lambda: _Whole(lambda: gnn.TransformerConv(FEATURES, FEATURES // 2, heads=2)), _nodes),
    "GPS": (lambda: _Whole(lambda: gnn.GPSConv(FEATURES, gnn.GINConv(_linear(FEATURES, FEATURES)), heads=2)), _nodes),
    "gated graphs": (lambda: _Whole(lambda: gnn.GatedGraphConv(FEATURES, 2)), _nodes),
    "Chebyshev": (lambda: _Whole(lambda: gnn.ChebConv(FEATURES, FEATURES, 2)), _nodes),
    "relational": (_Relational, _relations),
    "heterogeneous": (_Heterogeneous, _nodes),
}  # fmt: skip

ARCHITECTURES = listed("torch_geometric", _MODELS)
