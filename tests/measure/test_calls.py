"""How a converted net finds T in each of its calls, and what its classes are: copied, pickled, turned back."""

import copy
import pickle
import threading
import warnings

import pytest
import torch
from measure.small_nets import CASES, SIZE, C, Leaky, Looping, N, T
from measure.test_measured import frames, made
from torch import nn

import sj_tac
from sj_tac.definition.convs import SharedConv
from sj_tac.errors import CaptureWarning, ConversionError


class Folds(nn.Module):
    """Frames that are folded by hand, and a neuron that keeps no state: what a call gives depends on its input alone."""

    def __init__(self):
        super().__init__()
        self.conv, self.neuron = nn.Conv2d(C, C, 3, padding=1), Leaky()
        self.looping, self.second = Looping(C, C, 3, padding=1), Leaky()

    def forward(self, x, *, scale=1.0):
        y = self.conv(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        if scale < 0:
            raise ArithmeticError("on purpose")
        return self.second(self.looping(self.neuron(y * scale)))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Folds().double().eval()


def converted(net, k=2, fuse=False):
    return sj_tac.convert(net, "preserve", k, example_input=frames((T, N, C, SIZE, SIZE)), fuse=fuse)


def test_calls_in_two_threads_have_a_t_of_their_own(net):
    fast, found = converted(net), {}
    inputs = {steps: frames((steps, 5, C, SIZE, SIZE)) for steps in (4, 8, 6)}
    with torch.no_grad():
        wanted = {steps: fast(x) for steps, x in inputs.items()}

    def work(steps):
        with torch.no_grad():
            found[steps] = all(torch.equal(fast(inputs[steps]), wanted[steps]) for _ in range(20))

    threads = [threading.Thread(target=work, args=(steps,)) for steps in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(inputs, True)
    assert not torch.equal(wanted[4], net(inputs[4]))


@pytest.mark.captured
@pytest.mark.parametrize("fuse", [False, True])
def test_a_part_and_a_call_that_failed_share_nothing_and_say_so(net, fuse):
    fast, x = converted(net, fuse=fuse), frames((T, N, C, SIZE, SIZE))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = fast(x)
        with pytest.raises(ArithmeticError):
            fast(x, scale=-1.0)
        assert torch.equal(fast(x), wanted)
    with torch.no_grad():
        with pytest.warns(CaptureWarning, match=r"convolution 'conv' .* cannot tell T of its rows \[12, 4, 8, 8\]"):
            assert torch.equal(fast.conv(x.flatten(0, 1)), net.conv(x.flatten(0, 1)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fast.forward(x)
    said = " ".join(str(w.message) for w in caught)
    assert "'conv' computes what its source does" in said
    assert ("a part of this converted Folds was called" in said) == fuse


def test_a_converted_net_in_another_net_reads_its_own_calls(net):
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):  # [N, T, ...]
            return self.inner(x.transpose(0, 1))

    fast, x = converted(net), frames((6, 4, C, SIZE, SIZE))
    with torch.no_grad():
        assert torch.equal(Outer(fast)(x.transpose(0, 1)), fast(x))


@pytest.mark.parametrize("fuse", [False, True])
def test_classes_of_ones_own_are_copied_pickled_and_turned_back(net, fuse):
    fast, x = converted(net, fuse=fuse), frames((T, N, C, SIZE, SIZE))
    assert isinstance(fast.looping, Looping)
    assert isinstance(fast.looping, SharedConv)
    assert list(fast.state_dict()) == list(net.state_dict())
    with torch.no_grad():
        wanted = fast(x)
        for made_of in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            assert torch.equal(made_of(x), wanted)
            assert type(made_of.looping) is type(fast.looping)
        back = sj_tac.restore(fast, inplace=True)
        assert torch.equal(back(x), net(x))
    assert [type(m) for m in back.modules()] == [type(m) for m in net.modules()]
    assert all(
        vars(a).keys() <= vars(b).keys() | {"_compiled_call_impl"}
        for a, b in zip(back.modules(), net.modules(), strict=True)
    )
    assert not back._forward_pre_hooks
    assert not back._forward_hooks


@pytest.mark.parametrize(
    "name", ["plain", "samples first", "a convolution that loops over time", "an image that is repeated"]
)
def test_captured_nets_of_any_layout_are_the_definition(name, monkeypatch):
    monkeypatch.setenv("SJ_TAC_STRICT", "1")
    case, source = CASES[name], made(name)
    example = frames(case.shape)
    fast, slow = (sj_tac.convert(source, "preserve", 2, example_input=example, fuse=fuse) for fuse in (True, False))
    for shape in (case.shape, *case.others):
        x = frames(shape, 9)
        a, b = fast(x), slow(x)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        assert a.mean() > 0.02
        gradients = [torch.autograd.grad(y.sum(), net.conv.weight)[0] for y, net in ((a, fast), (b, slow))]
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)


class Images(nn.Module):
    def __init__(self, side):
        super().__init__()
        self.conv, self.neuron, self.fc = nn.Conv2d(3, C, 3, padding=1), Leaky(), nn.Linear(C * side * side, 2)

    def forward(self, x):
        y = self.neuron(self.conv(x).expand(T, *[-1] * x.dim()))
        return self.fc(y.flatten(2)).mean(0)


class Events(nn.Module):
    def __init__(self, side):
        super().__init__()
        self.conv, self.neuron, self.fc = nn.Conv2d(2, C, 3, padding=1), Leaky(), nn.Linear(C * side * side, 2)

    def forward(self, x):
        if x.dim() != 5 or x.shape[0] != 8:
            raise ValueError("frames [8, N, 2, H, W]")
        return self.fc(self.neuron(self.conv(x.flatten(0, 1)).unflatten(0, x.shape[:2])).flatten(2)).mean(0)


def test_without_an_example_a_usual_shape_is_found():
    fast = sj_tac.convert(Events(34).eval(), "preserve", 2, fuse=False)
    x = (torch.rand(8, 3, 2, 34, 34) < 0.5).float()
    assert not torch.equal(fast(x), Events(34).eval()(x))
    assert fast.conv.sharing.k == 2
    with pytest.raises(ConversionError, match=r"Events takes none of the usual shapes.*pass example_input=, a batch of two"):
        sj_tac.convert(Events(33).eval(), "preserve", 2)


def test_a_net_without_anything_to_share_says_what_was_seen():
    with pytest.raises(
        ConversionError, match="no convolution of Images can be converted:\n  conv: FRAMES_MEET: frames meet between"
    ):
        sj_tac.convert(Images(32).eval(), "preserve", 2)
