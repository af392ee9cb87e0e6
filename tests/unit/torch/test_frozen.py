"""Frozen tensors of equal content are one tensor, mapped from a file, and writes are found."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cerebro.errors import InputError
from cerebro.model import Info

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import cerebro.torch  # noqa: E402
from cerebro.torch.frozen import sum_bits  # noqa: E402
from cerebro.worker.sharing import Sharing, Unshared  # noqa: E402

WIDTH = 300  # so that a weight of bytes is mapped, too


def info_of(sharing: Unshared) -> Info:
    info = Info(1, 1, 1, 1, 0, 0)
    vars(info)["sharing"] = sharing
    return info


def make_net(dtype: Any = None) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = nn.Sequential(nn.Conv2d(8, 64, 5), nn.Linear(WIDTH, WIDTH)).to(dtype)
    base[0].to(memory_format=torch.channels_last)
    return nn.Sequential(base.requires_grad_(False), nn.Linear(WIDTH, 3))


def make_model(sharing: Unshared, net: Any = None) -> Any:
    net = make_net() if net is None else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = cerebro.torch.Model(net, optimizer=optimizer, loss=nn.MSELoss(), state="trainable")
    model.bind_info(info_of(sharing))
    return model


def frozen_of(model: Any) -> list[Any]:
    return [*model.net[0].parameters()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "float64"])
def test_processes_share_files_of_any_type_and_layout(tmp_path: Path, dtype: str) -> None:
    kind = getattr(torch, dtype)
    built, models = make_net(kind), [make_model(Sharing(0, str(tmp_path)), make_net(kind))]
    files = sorted(file.name for file in tmp_path.iterdir())
    assert len(files) == sum(p.nbytes >= 1 << 16 for p in built[0].parameters()) > 0
    sharing = Sharing(0, str(tmp_path))  # as of another process
    models += [make_model(sharing, make_net(kind)) for _ in range(2)]
    assert sorted(file.name for file in tmp_path.iterdir()) == files
    parameters = *map(frozen_of, models[1:]), frozen_of(SimpleNamespace(net=built))
    for one, same, own in zip(*parameters, strict=True):
        assert one.data_ptr() == same.data_ptr() != own.data_ptr()
        assert one.stride() == own.stride()
        assert one.dtype == own.dtype
        assert one.contiguous().view(torch.uint8).equal(own.contiguous().view(torch.uint8))


def test_a_damaged_file_is_written_again(tmp_path: Path) -> None:
    make_model(Sharing(0, str(tmp_path)))
    for number, file in enumerate(sorted(tmp_path.iterdir())):
        size = file.stat().st_size
        file.unlink()
        file.write_bytes(bytes(size if number else size // 2))
    model = make_model(Sharing(0, str(tmp_path)))
    for shared, own in zip(frozen_of(model), make_net()[0].parameters(), strict=True):
        assert torch.equal(shared, own)


def test_without_a_file_a_process_shares_memory(tmp_path: Path) -> None:
    sharing = Sharing(0, str(tmp_path / "missing"))
    models = [make_model(sharing) for _ in range(2)]
    pairs = zip(*map(frozen_of, models), strict=True)
    assert all(one.data_ptr() == other.data_ptr() for one, other in pairs)
    assert sharing.find_written() == []


def test_shared_weights_do_not_count_for_each_model(tmp_path: Path) -> None:
    sharing = Sharing(0, str(tmp_path))
    assert make_model(Unshared(0)).held_bytes == sum(p.nbytes for p in make_net()[0].parameters())
    models = [make_model(sharing) for _ in range(3)]
    assert [model.held_bytes for model in models] == [0] * 3
    assert sharing.nbytes == sum(p.nbytes for p in frozen_of(models[0]))
    models[0].net[0][1].requires_grad_(True)
    models[0].begin_unit([1])
    assert models[0].net[0][1].weight.data_ptr() != models[1].net[0][1].weight.data_ptr()
    del models
    import gc

    gc.collect()
    assert sharing.nbytes == 0


def test_a_write_is_found_once_and_the_next_model_has_what_build_made(tmp_path: Path) -> None:
    sharing = Sharing(0, str(tmp_path))
    model, other = make_model(sharing), make_model(sharing)
    assert sharing.find_written() == []
    model.net[0][1].weight.data[3, 5] += 1
    assert not torch.equal(other.net[0][1].weight, make_net()[0][1].weight)
    assert sharing.find_written() == ["0.1.weight"]
    assert sharing.writes == 1
    assert sharing.find_written() == []
    again = make_model(sharing)
    assert torch.equal(again.net[0][1].weight, make_net()[0][1].weight)
    assert again.net[0][0].weight.data_ptr() == other.net[0][0].weight.data_ptr()


def test_a_parameter_with_an_alias_is_not_shared(tmp_path: Path) -> None:
    """Training changes the alias, and with it the frozen parameter."""
    nets = [make_net() for _ in range(2)]
    for net in nets:
        net.alias = nn.Parameter(net[0][1].weight.data)
        net.register_buffer("seen", net[0][1].bias.data)
    models = [make_model(Sharing(0, str(tmp_path)), net) for net in nets]
    for model in models:
        layer = model.net[0][1]
        assert layer.weight.data_ptr() == model.net.alias.data_ptr()
        assert layer.bias.data_ptr() == model.net.seen.data_ptr()
    assert models[0].net[0][1].weight.data_ptr() != models[1].net[0][1].weight.data_ptr()


def test_parts_and_views_of_a_shared_tensor_stay_what_they_are(tmp_path: Path) -> None:
    info = info_of(Sharing(0, str(tmp_path)))
    base = info.shared("base", lambda: nn.Linear(WIDTH, WIDTH))
    weight = base.weight.data
    base.part = nn.Parameter(weight[:7], requires_grad=False)
    base.bits = nn.Parameter(weight.view(torch.int32), requires_grad=False)
    base.later = nn.Parameter(torch.rand(WIDTH)[WIDTH - 1 :].expand(WIDTH), requires_grad=False)
    expected = [weight[:7].clone(), weight.view(torch.int32).clone(), base.later.clone()]
    make_model(info.sharing, nn.Sequential(base, nn.Linear(WIDTH, 3)))
    for parameter, value in zip((base.part, base.bits, base.later), expected, strict=True):
        assert parameter.dtype == value.dtype
        assert torch.equal(parameter, value)


class Quantized(nn.Parameter):
    """Has an ordinary tensor as its data, but its class says what the numbers mean."""


def test_tensors_of_other_kinds_are_not_shared(tmp_path: Path) -> None:
    """The values of a sparse adjacency, for instance, are not in one piece of memory."""

    def make() -> Any:
        net = nn.Linear(WIDTH, WIDTH)
        net.packed = Quantized(torch.rand(WIDTH, WIDTH), requires_grad=False)
        quantized = torch.quantize_per_tensor(torch.rand(WIDTH, WIDTH), 0.1, 0, torch.quint8)
        net.quantized = nn.Parameter(quantized, requires_grad=False)
        return net

    info = info_of(Sharing(0, str(tmp_path)))
    nets = [info.shared("base", make) for _ in range(2)]
    for net in nets:
        assert type(net.packed) is Quantized
        assert net.quantized.is_quantized
        make_model(info.sharing, nn.Sequential(net, nn.Linear(WIDTH, 3)))
    assert nets[0].weight.data_ptr() == nets[1].weight.data_ptr()
    assert nets[0].packed.data_ptr() != nets[1].packed.data_ptr()
    assert torch.equal(nets[0].packed, nets[1].packed)
    for layout in ("to_sparse", "to_sparse_csr"):
        net = nn.Linear(WIDTH, 3)
        net.register_buffer("adjacency", getattr(torch.eye(4), layout)())
        model = cerebro.torch.Model(
            net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss=nn.MSELoss()
        )
        model.bind_info(info)
        assert net.adjacency.layout is getattr(torch.eye(4), layout)().layout


def test_an_info_can_be_copied_and_sent(tmp_path: Path) -> None:
    info = info_of(Sharing(3, str(tmp_path)))
    base = info.shared("base", lambda: nn.Linear(WIDTH, WIDTH))
    again = copy.deepcopy(info).shared("base", lambda: nn.Linear(1, 1))
    assert again.weight.data_ptr() == base.weight.data_ptr()
    alone = dataclasses.replace(info, trial=1).shared("base", lambda: nn.Linear(1, 1))
    assert alone.weight.numel() == 1 and not alone.weight.requires_grad
    assert dataclasses.asdict(info)["trial"] == 0
    sent = pickle.loads(pickle.dumps(info))
    again = sent.shared("base", lambda: nn.Linear(WIDTH, WIDTH))
    assert again.weight.data_ptr() != base.weight.data_ptr()
    assert torch.equal(again.weight, base.weight)


def test_a_trained_alias_of_a_shared_tensor_writes_to_it(tmp_path: Path) -> None:
    """As without sharing, so that the write is found; a second base of the same model is apart."""
    info = info_of(Sharing(0, str(tmp_path)))
    base, trained = (info.shared("base", lambda: nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    trained.requires_grad_(True)
    table = nn.Embedding.from_pretrained(base.weight, freeze=False)
    model = make_model(info.sharing, nn.Sequential(base, trained, table))
    with torch.no_grad():
        trained.weight.add_(1)
    assert info.sharing.find_written() == []
    with torch.no_grad():
        table.weight.add_(1)
    assert torch.equal(model.net[0].weight, table.weight)
    assert info.sharing.find_written() == ["weight"]


@pytest.mark.parametrize("built", [True, False])
def test_a_state_has_what_was_trained_also_if_it_is_frozen_now(tmp_path: Path, built: bool) -> None:
    models = []
    for _ in range(2):
        net = make_net()
        net[0][1].requires_grad_(built)
        models.append(make_model(Sharing(0, str(tmp_path)), net))
    model, other = models
    layer = model.net[0][1].requires_grad_(True)
    model.begin_unit([1])
    with torch.no_grad():
        layer.weight.add_(1)
    layer.requires_grad_(False)
    model.begin_unit([1])
    state = model.state_dict()
    assert {"0.1.weight", "0.1.bias"} <= state["net"].keys()
    assert not state["net"].keys() & {"0.0.weight", "0.0.bias"}
    other.load_state_dict(state)
    assert torch.equal(other.net[0][1].weight, layer.weight)
    assert not other.net[0][1].weight.requires_grad
    assert other.state_dict()["net"].keys() == state["net"].keys()


def test_tied_parameters_stay_tied_in_a_shared_module(tmp_path: Path) -> None:
    info = info_of(Sharing(0, str(tmp_path)))

    def make() -> Any:
        net = nn.Sequential(nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))
        net[1].weight = net[0].weight
        return net

    one, other = info.shared("tied", make), info.shared("tied", make)
    assert one[0].weight is one[1].weight is not other[0].weight
    assert one[0].weight.data_ptr() == other[0].weight.data_ptr()


def test_make_has_random_numbers_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(5)
    drawn = torch.rand(3)
    values = []
    for sharing in (Unshared(3), Sharing(3, str(tmp_path)), Unshared(4)):
        torch.manual_seed(5)
        info = info_of(sharing)
        values += [info.shared("a", lambda: torch.rand(3)), info.shared("b", lambda: torch.rand(3))]
        assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(values[0], values[2])
    assert torch.equal(values[1], values[3])
    different = (values[0], values[1], values[4], drawn)
    assert len({tuple(value.tolist()) for value in different}) == 4


def test_a_module_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    info = info_of(Sharing(0, str(tmp_path)))

    def make() -> Any:
        net = nn.Linear(2, 2)
        net.lock = (SimpleNamespace(generator=(n for n in ())),)
        return net

    with pytest.raises(InputError, match=r"info\.shared\('locked'\): the module cannot be copied"):
        info.shared("locked", make)


def test_sums_of_bits_change_with_a_word_and_with_an_exchange() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (3, 8, 1000, (1 << 19) + 13):
        content = torch.randint(0, 256, (size,), generator=generator).to(torch.uint8)
        before = sum_bits(content).tobytes()
        assert sum_bits(content.clone()).tobytes() == before
        for place in {0, size // 2, size - 1}:
            changed = content.clone()
            changed[place] ^= 128
            assert sum_bits(changed).tobytes() != before
        if size >= 16:
            words = content[: size // 8 * 8].view(torch.int64)
            for left, right in ((0, 1), (0, len(words) // 2), (1, len(words) - 1)):
                changed = content.clone()
                swapped = changed[: size // 8 * 8].view(torch.int64)
                swapped[left], swapped[right] = words[right], words[left]
                assert sum_bits(changed).tobytes() != before
