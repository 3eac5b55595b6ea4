"""A shared drive is its frames, whatever is done to it, and sums are only noted until somebody asks."""

import pytest
import torch
from support import frames
from torch import Tensor

from sj_tac.runtime.values import SharedDrive


def made(lengths=(2, 2, 1), residual=False, seed=0):
    torch.manual_seed(seed)
    drives = torch.randn(len(lengths), 2, 3, 4, 4, requires_grad=True)
    added = torch.randn(sum(lengths), 2, 3, 4, 4, requires_grad=True) if residual else None
    plain = torch.cat([d.unsqueeze(0).expand(n, *d.shape) for d, n in zip(drives, lengths, strict=True)])
    return SharedDrive.of(drives, lengths, added), plain if added is None else plain + added, drives, added


def lazy(x):
    return type(x) is SharedDrive and x._frames is None


@pytest.mark.parametrize("lengths", [(2, 2, 1), (3, 3), (1,)])
@pytest.mark.parametrize("residual", [False, True])
def test_anything_asked_of_it_is_asked_of_its_frames(lengths, residual):
    shared, plain, drives, _ = made(lengths, residual)
    assert isinstance(shared, Tensor)
    assert (shared.shape, shared.dtype, shared.device, shared.dim(), len(shared)) == (
        plain.shape, plain.dtype, plain.device, plain.dim(), len(plain),
    )  # fmt: skip
    assert lazy(shared), "a question about the shape makes no frames"
    for ask in (
        lambda t: t * 2, torch.relu, lambda t: t.flatten(0, 1), lambda t: t[1:], lambda t: torch.cat([t, t], 2),
        lambda t: t.mean(0), lambda t: torch.nn.functional.max_pool2d(t.flatten(0, 1), 2), lambda t: t - 1, lambda t: 1 + t,
        lambda t: torch.stack(list(t)), lambda t: t + t[:1], lambda t: torch.add(t, t, alpha=2),
    ):  # fmt: skip
        got = ask(made(lengths, residual)[0])
        assert type(got) is Tensor
        assert torch.equal(got, ask(plain))
    assert shared.requires_grad == plain.requires_grad
    (shared * 3).sum().backward()
    assert torch.equal(drives.grad, torch.stack([torch.full_like(d, 3.0 * n) for d, n in zip(drives, lengths, strict=True)]))


@pytest.mark.parametrize("order", [lambda a, b: a + b, lambda a, b: b + a, torch.add, lambda a, b: a.add(b)])
def test_sums_with_frames_are_noted(order):
    shared, plain, drives, _ = made()
    other = torch.randn_like(plain).requires_grad_()
    total = order(shared, other)
    assert lazy(total)
    assert total.residual is other
    assert total.drives is drives
    torch.testing.assert_close(total.frames(), plain + other)
    total.sum().backward()
    assert torch.equal(other.grad, torch.ones_like(other))
    assert lazy(shared), "the first drive is not changed by it"


def test_sums_of_drives_with_the_same_groups_stay_drives():
    a, plain_a, _, _ = made(residual=True)
    b, plain_b, _, _ = made(seed=1)
    total = a + b
    assert lazy(total)
    assert total.drives.shape[0] == 3
    torch.testing.assert_close(total.frames(), plain_a + plain_b)
    d, plain_d, _, _ = made(residual=True, seed=3)
    torch.testing.assert_close((made(residual=True)[0] + d).frames(), plain_a + plain_d)
    scale, shift = torch.rand(3) + 0.5, torch.randn(3)
    mapped = SharedDrive.of(a.drives, a.lengths, a.residual, (scale, shift)) + made(seed=1)[0]
    expected = plain_a + plain_b + (a.drives * (scale - 1).view(-1, 1, 1) + shift.view(-1, 1, 1))[[0, 0, 1, 1, 2]]
    torch.testing.assert_close(mapped.frames(), expected)
    c, plain_c, _, _ = made((3, 2), seed=2)
    mixed = a + c
    assert lazy(mixed)
    torch.testing.assert_close(mixed.frames(), plain_a + plain_c)


def test_in_place_sums_are_seen_through_every_name():
    with torch.no_grad():
        shared, plain, _, _ = made()
        alias, other = shared, torch.randn_like(plain)
        shared += other
        assert alias is shared
        assert lazy(alias)
        torch.testing.assert_close(alias * 1, plain + other)
        # Whoever has seen the frames sees what is added to them from then on, as in any tensor.
        seen = alias.frames()
        shared += other
        torch.testing.assert_close(seen, plain + 2 * other)
        # A sum into an ordinary tensor is an ordinary tensor.
        target = torch.zeros_like(plain)
        target += made()[0]
        assert type(target) is Tensor
        assert torch.equal(target, plain)


def test_other_shapes_and_dtypes_are_summed_as_frames():
    shared, plain, _, _ = made()
    for other in (plain[:1].detach(), plain.detach().double(), torch.tensor(1.0)):
        got = made()[0] + other
        assert type(got) is Tensor
        assert torch.equal(got, plain + other)
    assert shared.map(lambda t: t * 2).frames().equal(plain * 2)
    with_residual, plain, _, _ = made(residual=True)
    assert torch.equal(with_residual.map(torch.relu), torch.relu(plain))


def test_frames_are_made_once():
    shared, _, _, _ = made(residual=True)
    assert shared.frames() is shared.frames()
    first = shared * 1
    assert torch.equal(first, shared.frames())
    assert frames(1, 2).shape == (1, 2)
