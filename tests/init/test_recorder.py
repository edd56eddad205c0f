"""Recorded initialisation gives the bits of an ordinary CPU build, one tensor at a time, in any order."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero.errors import MaterialiseError
from lightning_zero.init import InitRecord, InitRecorder

Build = Callable[[], nn.Module]


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(
        [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)],
    )


def seeded(build: Build) -> nn.Module:
    torch.manual_seed(7)
    np.random.seed(1)
    return build()


def recorded(build: Build) -> tuple[nn.Module, InitRecord]:
    with InitRecorder() as record, torch.device("meta"):
        return seeded(build), record


def assert_same(got: Tensor, expected: Tensor, name: str) -> None:
    """Same shape, dtype, strides and bits; NaN equals NaN."""
    assert (got.shape, got.dtype, got.stride()) == (expected.shape, expected.dtype, expected.stride()), name
    got, expected = got.resolve_conj().resolve_neg(), expected.detach().resolve_conj().resolve_neg()
    assert torch.equal(
        got.reshape(-1).contiguous().view(torch.uint8), expected.reshape(-1).contiguous().view(torch.uint8)
    ), name


def check(build: Build) -> None:
    ordinary = seeded(build)
    end = torch.get_rng_state()
    deferred, record = recorded(build)
    assert torch.equal(torch.get_rng_state(), end), "the build has to leave the generator where an ordinary one does"
    expected, tensors = named_tensors(ordinary), named_tensors(deferred)
    assert list(expected) == list(tensors)
    order = [name for name, tensor in tensors.items() if tensor.is_meta]
    record.check([tensors[name] for name in order], order)
    random.Random(0).shuffle(order)
    for name in order:
        (got,) = record.materialise([tensors[name]], names=[name])
        assert_same(got, expected[name], name)
    assert torch.equal(torch.get_rng_state(), end), "materialising must not touch the generator"


# ---------------------------------------------------------------------------------------------------------------------
# torch's own layers and initialisers

LAYERS: dict[str, Build] = {
    "Linear": lambda: nn.Linear(8, 6),
    "Bilinear": lambda: nn.Bilinear(3, 4, 5),
    "Embedding": lambda: nn.Embedding(20, 6, padding_idx=3),
    "EmbeddingBag": lambda: nn.EmbeddingBag(20, 6),
    "Conv1d": lambda: nn.Conv1d(4, 6, 3),
    "Conv2d": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "Conv3d": lambda: nn.Conv3d(4, 6, 3),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(4, 6, 3),
    "LSTM": lambda: nn.LSTM(8, 8, 2, proj_size=3, bidirectional=True),
    "GRU": lambda: nn.GRU(5, 7, 2),
    "RNN": lambda: nn.RNN(5, 7),
    "LSTMCell": lambda: nn.LSTMCell(5, 7),
    "MultiheadAttention": lambda: nn.MultiheadAttention(8, 2),
    "MultiheadAttention_kv": lambda: nn.MultiheadAttention(8, 2, kdim=5, vdim=6, add_bias_kv=True),
    "BatchNorm": lambda: nn.BatchNorm2d(6),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(6),
    "InstanceNorm": lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
    "LayerNorm": lambda: nn.LayerNorm(6),
    "GroupNorm": lambda: nn.GroupNorm(2, 6),
    "RMSNorm": lambda: nn.RMSNorm(6),
    "PReLU": lambda: nn.PReLU(3),
    "AdaptiveSoftmax": lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10]),
    "TransformerEncoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3),
    "Transformer": lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 6, 3)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)),
    "orthogonal_cayley": lambda: nn.utils.parametrizations.orthogonal(
        nn.Linear(6, 4), orthogonal_map="cayley", use_trivialization=False
    ),
    "deepcopy": lambda: nn.ModuleList(
        copy.deepcopy(nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))) for _ in range(3)
    ),
    "channels_last": lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
}

INITIALISERS: dict[str, Callable[[Tensor], Any]] = {
    "uniform": init.uniform_,
    "normal": init.normal_,
    "ones": init.ones_,
    "zeros": init.zeros_,
    "constant": lambda w: init.constant_(w, 0.3),
    "eye": init.eye_,
    "xavier_uniform": init.xavier_uniform_,
    "xavier_normal": init.xavier_normal_,
    "kaiming_uniform": init.kaiming_uniform_,
    "kaiming_normal": lambda w: init.kaiming_normal_(w, mode="fan_out"),
    "trunc_normal": init.trunc_normal_,
    "trunc_normal_wide": lambda w: init.trunc_normal_(w, std=0.02),
    "trunc_normal_narrow": lambda w: init.trunc_normal_(w, a=-0.5, b=0.1),
    "trunc_normal_tail": lambda w: init.trunc_normal_(w, mean=2.9),
    "orthogonal": lambda w: init.orthogonal_(w, gain=2.0),
    "sparse": lambda w: init.sparse_(w, 0.3),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    check(LAYERS[name])


@pytest.mark.parametrize("shape", [(8, 6), (5, 9), (33, 47)], ids=str)
@pytest.mark.parametrize("name", INITIALISERS)
def test_initialiser(name: str, shape: tuple[int, int]) -> None:
    def build() -> nn.Module:
        layer = nn.Linear(*shape)
        for _ in range(2):  # twice: the second draw has to start where the first one ended
            INITIALISERS[name](layer.weight)
        return layer

    check(build)


@pytest.mark.parametrize("convolution", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_dirac(convolution: Any) -> None:
    def build() -> nn.Module:
        layer = convolution(4, 6, 3)
        init.dirac_(layer.weight, groups=2)
        return layer

    check(build)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype(dtype: torch.dtype) -> None:
    check(lambda: nn.Linear(5, 7, dtype=dtype))
    check(lambda: nn.Linear(5, 7).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_default_dtype_of_the_build_holds_in_the_replay(dtype: torch.dtype) -> None:
    def build() -> nn.Module:
        torch.set_default_dtype(dtype)
        try:
            module = nn.Linear(5, 7)
            module.register_buffer("thirds", torch.arange(4) / 3)  # an integer divided: the default dtype
            module.register_buffer("noise", torch.randn(5))
            return module
        finally:
            torch.set_default_dtype(torch.float32)

    check(build)


# ---------------------------------------------------------------------------------------------------------------------
# What models do


class GPT(nn.Module):
    """GPT-2's initialisation, a ViT's position table, stochastic depth, ties and views."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32) for _ in range(3))
        self.head = nn.Linear(16, 30, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("linear2.weight"):
                init.normal_(parameter, 0.0, 0.02 / math.sqrt(6))
        self.positions = nn.Parameter(torch.zeros(1, 9, 16))
        init.trunc_normal_(self.positions, std=0.02)
        self.drop_path = torch.linspace(0, 0.1, 3).tolist()
        self.register_buffer("rates", torch.tensor([rate.item() for rate in torch.linspace(0, 0.1, 3)]))
        self.register = nn.Parameter(torch.randn(16) / 10)
        self.part = nn.Parameter(self.register.data[:4].clone())
        self.transposed = nn.Parameter(self.register.data.view(4, 4).t())

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0.0, 0.02)
        if isinstance(module, nn.Embedding):
            module.weight.data[0].zero_()
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()


@pytest.mark.parametrize("tied", [True, False])
def test_gpt(tied: bool) -> None:
    check(lambda: GPT(tied))
    check(lambda: copy.deepcopy(GPT(tied)).bfloat16())


class Tables(nn.Module):
    """Buffers: rotary tables, masks, literals, numpy arrays."""

    def __init__(self) -> None:
        super().__init__()
        inverse = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        angles = torch.outer(torch.arange(16, dtype=torch.float32), inverse)
        rotations = torch.polar(torch.ones_like(angles), angles)
        tables = {
            "cos": torch.cat([angles, angles], -1).cos(),
            "rotations": rotations,
            "conjugate": rotations.conj(),
            "imaginary": rotations.conj().imag,
            "infinite": torch.triu(torch.full((5, 5), float("-inf")), 1),
            "causal": torch.tril(torch.ones(5, 5)).view(1, 1, 5, 5),
            "literal": torch.tensor([1.0, 2.0, 3.0]),
            "scalar": torch.tensor(3),
            "array": torch.tensor(np.arange(4.0)),
            "shared_array": torch.as_tensor(np.arange(4.0)),
            "list": torch.as_tensor([1, 2]),
            "asarray": torch.asarray([1.0, 2.0]),
            "mixed": torch.from_numpy(np.random.rand(3)) * torch.arange(3),
            "filled": torch.zeros(3).fill_(torch.tensor(2.0)),
            "stacked": torch.stack([torch.zeros(2), torch.ones(2)]).T,
        }
        tables["new"] = tables["literal"].new_tensor([4.0, 5.0])
        tables["from_tensors"] = torch.tensor([torch.tensor(1.0), tables["literal"][1]])
        tables["positions"] = tables["causal"][0, 0].nonzero()
        tables["selected"] = tables["cos"][tables["cos"] > 0]
        for name, table in tables.items():
            self.register_buffer(name, table)


class Draws(nn.Module):
    """Random numbers from every kind of place."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(3)
        draws = {
            "rand": torch.rand(3, 5),
            "permutation": torch.randperm(9),
            "integers": torch.randint(0, 9, (4,)),
            "choice": torch.multinomial(torch.ones(5), 3),
            "coins": torch.bernoulli(torch.full((7,), 0.3)),
            "poisson": torch.poisson(torch.full((7,), 3.0)),
            "normal": torch.normal(torch.zeros(4), torch.ones(4)),
            "like": torch.rand_like(torch.zeros(3, 2)),
            "dropped": nn.functional.dropout(torch.ones(9)),
            "own_first": torch.rand(3, generator=own),
            "real": torch.randn(4, device="cpu"),
            "after_real": torch.randn(4),
        }
        draws["own_second"] = torch.empty(3).normal_(generator=own)
        torch.manual_seed(11)
        draws["reseeded"] = torch.randn(3)
        with torch.random.fork_rng():
            draws["forked"] = torch.randn(3)
        draws["after_fork"] = torch.randn(3)
        for name, draw in draws.items():
            self.register_buffer(name, draw)


@pytest.mark.parametrize("build", [Tables, Draws])
def test_buffers(build: Build) -> None:
    check(build)


def rewritten() -> nn.Module:
    layer = nn.Linear(8, 8)
    weight = layer.weight
    with torch.no_grad():
        weight[1].zero_()
        weight[[0, 2]] = 3.0
        weight[np.array([0, 3])] = 9.0
        weight[torch.tensor([4, 5])] *= 2
        weight[:, 3].normal_()
        weight[2:4, 1:3].uniform_()
        weight[weight > 0.2] = 0.5
        weight[:, [1, 2]] = weight[:, [2, 1]]
        weight.copy_(weight.t().clone())
        weight[5] = weight[6]
        if weight.sum() > 0:
            weight.neg_()
        if weight[0, 0].item() < 0:
            weight += 1
        weight.copy_(torch.from_numpy(np.random.randn(8, 8)))
        weight.data = weight.data * 2
        torch.add(weight, 1, out=weight.data)
        torch._foreach_mul_([weight, layer.bias], 2.0)
        weight.div_(weight.norm())
        weight.index_fill_(0, torch.tensor([1]), 7.0)
        weight.masked_fill_(torch.eye(8, dtype=torch.bool), 0)
        weight[0].random_(5)
        weight[1].geometric_(0.5)
        weight[2].cauchy_()
        weight[3].log_normal_()
        weight[4].bernoulli_(0.5)
        weight[5].bernoulli_(weight[4])
        weight[6].exponential_()
        layer.bias.copy_(torch.randn(8, device="cpu"))
    return layer


def loaded() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.load_state_dict({"weight": torch.randn(3, 3, device="cpu"), "bias": torch.ones(3, device="cpu")})
    return layer


def partly_real() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3, device="cpu"), nn.Linear(3, 3), nn.Linear(3, 3).to("cpu"))


def asks_whether_meta() -> nn.Module:
    layer = nn.Linear(3, 3)
    for parameter in layer.parameters():
        if not parameter.is_meta:
            init.normal_(parameter)
    return layer


def skips_where(on_meta: Callable[[nn.Module], bool]) -> Build:
    """A model with an initialisation of its own, which it leaves out where it takes its tensors for empty ones."""

    def build() -> nn.Module:
        layer = nn.Linear(3, 3)
        if not on_meta(layer):
            init.normal_(layer.weight, std=0.02)
            init.zeros_(layer.bias)
        return layer

    return build


META = torch.device("meta")
WAYS_TO_ASK: dict[str, Callable[[nn.Module], bool]] = {
    "is_meta": lambda layer: layer.weight.is_meta,
    "is_cpu": lambda layer: not layer.weight.is_cpu,
    "device": lambda layer: layer.weight.device == META,
    "type": lambda layer: layer.weight.device.type == "meta",
    "default": lambda layer: torch.get_default_device() == META,
    "probe": lambda layer: torch.tensor([]).device == META,
    # transformers: a context counts if it is not the default
    "both": lambda layer: META in (torch.tensor([]).device, torch.get_default_device()),
}


@pytest.mark.parametrize("way", WAYS_TO_ASK)
def test_initialisation_that_would_be_skipped_on_meta(way: str) -> None:
    check(skips_where(WAYS_TO_ASK[way]))


def makes_more_where_the_first_is() -> nn.Module:
    layer = nn.Linear(3, 3)
    where = layer.weight.device
    layer.second = nn.Linear(3, 2, device=where)
    layer.scale = nn.Parameter(torch.ones(3, device=where).to(layer.weight.device))
    layer.register_buffer("steps", torch.arange(4, device=torch.get_default_device()))
    layer.register_buffer("noise", torch.rand(3, generator=torch.Generator(device=where).manual_seed(3)))
    return layer


def test_tensors_made_on_the_device_of_a_meta_tensor_are_meta_tensors() -> None:
    check(makes_more_where_the_first_is)
    model, _ = recorded(makes_more_where_the_first_is)
    assert all(tensor.is_meta for tensor in named_tensors(model).values())


def test_outside_of_a_device_context_the_device_is_what_it_is() -> None:
    with InitRecorder():
        with torch.device("meta"):
            layer = nn.Linear(3, 3)
        assert layer.weight.device == META
        assert torch.get_default_device() == torch.device("cpu")
        assert nn.Linear(3, 3, device="meta").weight.device == META


class Pretrained(nn.Module):
    """What ``from_pretrained`` of transformers does: build on meta, take the file's tensors, initialise the others."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)
        self.init_weights()

    def init_weights(self) -> None:
        for layer in (self.body, self.head):
            if layer.weight.device.type != "meta" and not hasattr(layer, "ready"):
                init.normal_(layer.weight, std=0.02)
                layer.ready = True

    @classmethod
    def from_pretrained(cls, stored: dict[str, Tensor]) -> nn.Module:
        with torch.device("meta"):
            model = cls()
        model.load_state_dict(stored, strict=False, assign=True)
        model.body.ready = True
        for name, tensor in list(model.head.named_parameters()):
            setattr(model.head, name, nn.Parameter(torch.zeros_like(tensor, device="cpu")))
        model.init_weights()
        return model


def test_from_pretrained_loads_and_draws_as_without_a_recorder() -> None:
    stored = {"body.weight": torch.full((3, 3), 0.5), "body.bias": torch.full((3,), 0.25)}
    expected = named_tensors(seeded(lambda: Pretrained.from_pretrained(stored)))
    end = torch.get_rng_state()
    with InitRecorder() as record:
        model = seeded(lambda: nn.Sequential(Pretrained.from_pretrained(stored)))[0]
    for name, tensor in named_tensors(model).items():
        assert_same(tensor.detach(), expected[name], name)
    assert torch.equal(torch.get_rng_state(), end)
    assert record.nbytes == 0
    with InitRecorder() as record, META:  # after it everything is recorded again
        layer = nn.Linear(3, 3)
    assert record.check([layer.weight]) is None


class Filled(nn.Module):
    @classmethod
    def from_pretrained(cls, stored: Tensor) -> nn.Module:
        layer = nn.Linear(3, 3)
        with torch.no_grad():
            layer.weight.copy_(stored)
        return layer


def test_what_from_pretrained_writes_into_the_meta_tensors_of_the_user_is_recorded() -> None:
    stored = torch.randn(3, 3)
    check(lambda: Filled.from_pretrained(stored))


TRANSFORMERS = {
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "LlamaForCausalLM": {"num_key_value_heads": 2},
    "BertForMaskedLM": {},
    "T5ForConditionalGeneration": {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4},
    "ViTForImageClassification": {"image_size": 32, "patch_size": 8},
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    kind = getattr(transformers, name)
    check(lambda: kind(kind.config_class(**{**common, "intermediate_size": 37, **TRANSFORMERS[name]})))


@pytest.mark.parametrize("build", [rewritten, loaded, partly_real, asks_whether_meta])
def test_python_code(build: Build) -> None:
    check(build)


def test_constants_are_copied_when_recorded() -> None:
    source = torch.ones(3)
    with InitRecorder() as record:
        target = torch.empty(3, device="meta").copy_(source)
    source.zero_()
    assert torch.equal(record.materialise([target])[0], torch.ones(3))


def test_the_lifting_of_a_literal_is_no_operation_of_its_own() -> None:
    """Torch 2.15 dispatches this for a literal on meta, before its numbers are known to the record."""
    bare = torch.empty(2, device="meta")
    with InitRecorder() as record:
        lifted = torch.ops.aten.lift_fresh.default(bare)
        assert not record.tracks(lifted)
        record.literal(torch.tensor([1.0, 2.0]), lifted)
    assert torch.equal(record.materialise([bare])[0], torch.tensor([1.0, 2.0]))


def test_without_a_device_context_nothing_is_recorded_of_real_tensors() -> None:
    with InitRecorder() as record:
        real = nn.Linear(3, 3)
    assert not any(tensor.is_meta for tensor in named_tensors(real).values())
    assert record.nbytes == 0


def test_ties_share_memory() -> None:
    model, record = recorded(lambda: GPT(tied=True))
    assert isinstance(model, GPT)
    first, second = record.materialise([model.tokens.weight, model.head.weight.data.t()])
    assert first.data_ptr() == second.data_ptr()
    assert not first.requires_grad


def test_inside_another_context() -> None:
    """Autocast, inference mode, and a default device of the caller change nothing."""
    expected = named_tensors(seeded(Tables))
    model, record = recorded(Tables)
    tensors = named_tensors(model)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        values = record.materialise(list(tensors.values()))
    for name, got in zip(tensors, values, strict=True):
        assert not got.is_inference()
        assert_same(got, expected[name], name)


# ---------------------------------------------------------------------------------------------------------------------
# Memory


class LiveBytes(TorchDispatchMode):
    """Peak of the bytes of all real tensors that operations inside returned."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: pair for key, pair in self._live.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return result


def stack() -> nn.Module:
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(6)])
    for block in blocks:
        init.normal_(block[0].weight)
        init.trunc_normal_(block[1].weight)
    return blocks


def test_one_block_needs_the_memory_of_one_block() -> None:
    model, record = recorded(stack)
    block = list(model.get_submodule("3").parameters())
    nbytes = sum(parameter.numel() * 4 for parameter in block)
    with LiveBytes() as memory:
        record.materialise(block)
    # trunc_normal_ needs a mask (1 byte each) and two candidates (4 bytes each) for each of 64 x 64 elements, at most
    # three times while one result replaces another.
    assert nbytes <= memory.peak <= nbytes + 3 * 64 * 64 * 9


def test_building_needs_the_memory_of_one_tensor() -> None:
    with LiveBytes() as memory:
        recorded(stack)
    assert memory.peak <= 64 * 64 * 4 + 3 * 64 * 64 * 9 + 65536  # and generator states of 5 KB


def test_the_record_holds_no_values() -> None:
    _, record = recorded(stack)
    # 6 blocks x (2 layers x 2 draws + 2 draws) = 36 draws, with a state of about 5 KB each
    assert record.nbytes == 36 * torch.get_rng_state().numel()


def test_overwritten_draws_are_not_replayed() -> None:
    model, record = recorded(stack)
    drawn: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            drawn.append(str(func))
            return func(*args, **(kwargs or {}))

    with Names():
        record.materialise([model.get_submodule("2.0").weight])
    assert [name for name in drawn if "uniform" in name or "normal" in name] == ["aten.normal_.default"]


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def test_made_before_the_recording() -> None:
    before = torch.ones(3, device="meta")
    with InitRecorder() as record:
        after = before * 2
        overwritten = torch.ones(2, device="meta")
    with pytest.raises(MaterialiseError, match="values of scale depend on a meta tensor"):
        record.materialise([overwritten, after], names=["other", "scale"])
    with pytest.raises(MaterialiseError, match="values of early depend"):
        record.check([before], ["early"])


def test_made_before_but_initialised_inside() -> None:
    early = nn.Linear(3, 3, device="meta")
    torch.manual_seed(0)
    with InitRecorder() as record:
        early.reset_parameters()
    torch.manual_seed(0)
    assert torch.equal(record.materialise([early.weight])[0], nn.Linear(3, 3).weight)


def test_reading_a_tensor_from_before_the_recording() -> None:
    before = torch.ones(3, device="meta")
    with InitRecorder(), pytest.raises(MaterialiseError, match="_local_scalar_dense"):
        before[0].item()


def test_numpy() -> None:
    with InitRecorder(), pytest.raises(MaterialiseError, match="tolist"):
        torch.ones(3, device="meta").numpy()


def test_lazy_module() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, record = recorded(lambda: nn.LazyLinear(3))
    with pytest.raises(MaterialiseError, match="lazy"):
        record.check(list(model.parameters()))


def test_subclass() -> None:
    class Wrapped(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with InitRecorder(), pytest.raises(MaterialiseError, match="Wrapped"):
        torch.ones(3, device="meta").as_subclass(Wrapped).mul(2)


def test_real_tensor_is_a_mistake_of_the_caller() -> None:
    with InitRecorder() as record:
        pass
    with pytest.raises(ValueError, match="meta device"):
        record.materialise([torch.ones(1)])


def test_errors_of_the_model_stay_what_they_are() -> None:
    with InitRecorder(), torch.device("meta"), pytest.raises(RuntimeError, match="reduction dim"):
        torch.ones(3, 4) @ torch.ones(3, 4)
