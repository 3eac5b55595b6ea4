"""save and load: the same net again, bit by bit, from a file without code, whatever its tensors are like."""

import copy

import pytest
import torch
from matched import X, narrow
from safetensors.torch import load_file
from spikingjelly.activation_based import layer
from support import at_rest, conv, csnn as made, frames, node, norm, same_state
from torch import nn

import sj_tac
from sj_tac.errors import CheckpointError

FRAMES = frames(8, 3, 2, 8, 8)
NET = made()


def csnn():
    """A net of its own, without waking it up again."""
    return copy.deepcopy(NET)


def fresh():
    """The class again, with weights of its own."""
    net = csnn()
    torch.manual_seed(99)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    return net


def state_of(path):
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)["state_dict"]


RULES = [{"match": "0", "mode": "preserve", "k": 8}, {"match": "8", "mode": "collapse"}]
POLICIES = {
    "collapse": ("pt", {"default": {"mode": "collapse", "k": 4}}),
    "binary": ("safetensors", {"default": {"mode": "collapse", "k": 2, "spikes": "binary", "emit": "groups"}}),
    "learned": ("pt", {"default": {"k": 4, "weights": "learned"}}),
    "mixed": ("safetensors", {"default": {"k": 4, "weights": "mixed"}}),
    "linear": ("pth", {"layers": ["conv", "linear"], "default": {"k": 2, "normalize": False}}),
    "rules": ("safetensors", {"default": {"mode": "keep"}, "rules": RULES}),
}


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_net_again(tmp_path, name):
    suffix, policy = POLICIES[name]
    source = csnn()
    fast = sj_tac.convert(source, policy)
    with torch.no_grad():
        for key, parameter in fast.named_parameters():
            if "tac_logits" in key:
                parameter.add_(torch.linspace(0, 1, len(parameter)))
    path = tmp_path / f"net.{suffix}"
    sj_tac.save(fast, path)
    model = fresh()
    before = copy.deepcopy(model.state_dict())
    again = sj_tac.load(path, model)
    assert torch.equal(at_rest(again, FRAMES), at_rest(fast, FRAMES))
    assert at_rest(fast, FRAMES).sum() > 0
    assert same_state(again, fast)
    assert sj_tac.policy_of(again) == sj_tac.policy_of(fast) == sj_tac.report(again).policy
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert type(model[0]) is layer.Conv2d
    # Twice the same bytes, from the loaded net, too.
    written = path.read_bytes()
    sj_tac.save(again, path)
    assert path.read_bytes() == written
    # What others read is the source's own state_dict, but for learned weights.
    state = {key: value for key, value in state_of(path).items() if "tac_logits" not in key}
    assert all(torch.equal(state[key], value) for key, value in source.state_dict().items())
    model.load_state_dict(state)


def test_as_it_now_is_after_set_k_and_unfused(tmp_path):
    fast = sj_tac.convert(csnn(), "preserve", 4, fuse=False)
    sj_tac.set_k(fast, 8, "4")
    sj_tac.save(fast, tmp_path / "net.safetensors")
    again = sj_tac.load(tmp_path / "net.safetensors", fresh())
    assert [(v.layer, v.k, v.kernel) for v in sj_tac.report(again).converted] == [
        ("0", 4, "reference"), ("4", 8, "reference"), ("8", 4, "reference")
    ]  # fmt: skip
    assert torch.equal(at_rest(again, FRAMES), at_rest(fast, FRAMES))


def test_what_match_wrote_can_be_taken_back_from_the_file(tmp_path):
    source = narrow()
    fast = sj_tac.convert(source, "preserve", 4)
    sj_tac.match(fast, X, method="moments", progress=False)
    assert not same_state(fast, source)
    sj_tac.save(fast, tmp_path / "net.safetensors")
    model = narrow()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    again = sj_tac.load(tmp_path / "net.safetensors", model)
    assert torch.equal(at_rest(again, X), at_rest(fast, X))
    assert "matched by 'moments'" in str(sj_tac.report(again).notes)
    assert sj_tac.report(again).notes == sj_tac.report(fast).notes
    assert same_state(sj_tac.restore(again), source)
    sj_tac.match(again, undo=True)
    assert same_state(again, source)


class Tied(nn.Module):
    """Two convolutions of the same shape; ``tied``: with one weight."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(conv(2, 2, bias=False), norm(2), node("lif"), conv(2, 2, bias=False), norm(2), node("lif"))
        self.register_buffer("scale", torch.rand(4, 4))
        self.register_buffer("same", self.scale)
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("also_empty", torch.empty(0, 3))
        self.register_buffer("bits", torch.ones(2).bool())
        self.register_buffer("conjugate", torch.tensor([1 + 2j]).conj())
        if tied:
            self.body[3].weight = self.body[0].weight

    def forward(self, x):
        return self.body(x)


def test_tied_tensors_are_tied_again(tmp_path):
    path = tmp_path / "net.safetensors"
    fast = sj_tac.convert(Tied(tied=True))
    assert fast.body[0].weight is fast.body[3].weight
    sj_tac.save(fast, path)
    assert "body.3.weight" not in state_of(path)
    for model in (Tied(), Tied(tied=True)):
        again = sj_tac.load(path, model)
        assert again.body[0].weight is again.body[3].weight
        assert again.same is again.scale
        assert again.empty is not again.also_empty
        assert torch.equal(again.conjugate, fast.conjugate)
        assert [n for n, _ in again.named_parameters()] == [n for n, _ in fast.named_parameters()]
        assert torch.equal(at_rest(again, FRAMES), at_rest(fast, FRAMES))
    assert model.body[0].weight is not again.body[0].weight
    # Parameters of their own in one memory stay two; what was apart may not be one in the model.
    fast = sj_tac.convert(Tied())
    fast.body[3].weight.data = fast.body[0].weight.data
    sj_tac.save(fast, path)
    again = sj_tac.load(path, Tied())
    assert again.body[0].weight is not again.body[3].weight
    assert again.body[0].weight.data_ptr() == again.body[3].weight.data_ptr()
    sj_tac.save(sj_tac.convert(Tied()), path)
    with pytest.raises(CheckpointError, match=r"shares one tensor for \['body.0.weight', 'body.3.weight'\]"):
        sj_tac.load(path, Tied(tied=True))


def test_slices_of_one_memory_are_written_apart(tmp_path):
    """As optimizers and cuDNN lay parameters out: slices of one flat tensor."""
    net = Tied()
    flat = torch.rand(72)
    net.body[0].weight.data, net.body[3].weight.data = flat[:36].view(2, 2, 3, 3), flat[36:].view(2, 2, 3, 3)
    fast = sj_tac.convert(net)
    sj_tac.save(fast, tmp_path / "net.pt")
    assert (tmp_path / "net.pt").stat().st_size < 40_000
    # The first bytes say what a file is, not its name.
    (tmp_path / "net.pt").rename(tmp_path / "net.safetensors")
    assert torch.equal(at_rest(sj_tac.load(tmp_path / "net.safetensors", Tied()), FRAMES), at_rest(fast, FRAMES))


def test_memory_formats_are_kept(tmp_path):
    last = sj_tac.convert(csnn().to(memory_format=torch.channels_last))
    usual = sj_tac.convert(csnn())
    assert last[0].weight.stride() != usual[0].weight.stride()
    for path, fast in ((tmp_path / "last.pt", last), (tmp_path / "usual.safetensors", usual)):
        sj_tac.save(fast, path)
        for model in (fresh(), fresh().to(memory_format=torch.channels_last)):
            again = sj_tac.load(path, model)
            assert {k: v.stride() for k, v in again.state_dict().items()} == {
                k: v.stride() for k, v in fast.state_dict().items()
            }
            assert torch.equal(at_rest(again, FRAMES), at_rest(fast, FRAMES))


@pytest.mark.parametrize(("dtype", "suffix"), [(torch.bfloat16, "safetensors"), (torch.float64, "pt")])
def test_dtypes_are_those_of_the_file_or_an_error(tmp_path, dtype, suffix):
    fast = sj_tac.convert(csnn()).to(dtype)
    path = tmp_path / f"net.{suffix}"
    sj_tac.save(fast, path)
    again = sj_tac.load(path, fresh().to(dtype))
    assert again[0].weight.dtype is dtype
    assert same_state(again, fast)
    with pytest.raises(CheckpointError, match=rf"'0.weight' is {dtype} there, and torch.float32 in the model"):
        sj_tac.load(path, fresh())
    assert torch.equal(sj_tac.load(path, fresh(), cast=True)[0].weight, fast[0].weight.float())


class WithExtras(nn.Sequential):
    extra = {"epoch": 3, "names": ["a", None], "rate": 0.5}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_extra_state(tmp_path):
    fast = sj_tac.convert(WithExtras(*csnn()))
    path = tmp_path / "net.pt"
    for extra in ({"epoch": 3, "names": ["a", None]}, torch.rand(2, 3), None):
        fast.extra = extra
        sj_tac.save(fast, path)
        model = WithExtras(*fresh())
        model.extra = torch.zeros(2, 3) if isinstance(extra, torch.Tensor) else {"epoch": 0}
        found = sj_tac.load(path, model).extra
        assert torch.equal(found, extra) if isinstance(extra, torch.Tensor) else found == extra
    before = path.read_bytes()
    for extra in ((1, 2), {1: 2}, {"a": object()}, {"a": torch.zeros(1)}, b"code"):
        fast.extra = extra
        with pytest.raises(CheckpointError, match="'_extra_state' of the state_dict is a"):
            sj_tac.save(fast, path)
    assert path.read_bytes() == before


class ByHand(nn.Module):
    def __init__(self, k=4, stride=1):
        super().__init__()
        torch.manual_seed(5)
        self.first = sj_tac.TACTP(conv(2, 4), norm(4), node("lif", v_threshold=0.3), k=k)
        self.second = sj_tac.TAC(conv(4, 4, stride=stride), norm(4), node("lif", v_threshold=0.3), k=2, weights="learned")

    def forward(self, x):
        return self.second(self.first(x))


def test_nets_by_hand(tmp_path):
    net, path = ByHand(), tmp_path / "net.safetensors"
    with torch.no_grad():
        net.second.conv.tac_logits.copy_(torch.tensor([1.0, -1.0]))
        net.first.conv.weight.mul_(1.5)
    sj_tac.save(net.eval(), path)
    model = ByHand().eval()
    again = sj_tac.load(path, model)
    assert torch.equal(at_rest(again, FRAMES), at_rest(net, FRAMES))
    assert at_rest(net, FRAMES).sum() > 0
    assert not torch.equal(model.first.conv.weight, again.first.conv.weight)
    with pytest.raises(CheckpointError, match=r"layer 'first.conv' has k=4, and this model k=2"):
        sj_tac.load(path, ByHand(k=2))
    with pytest.raises(CheckpointError, match=r"'second.conv' has stride=\[1, 1\], and this model stride=\[2, 2\]"):
        sj_tac.load(path, ByHand(stride=2))
    with pytest.raises(sj_tac.errors.ConversionError, match="not a converted model"):
        sj_tac.load(path, csnn())


def test_layers_of_odd_names(tmp_path):
    """Names that a policy would read as patterns."""
    net = nn.Sequential()
    for name, module in zip(("re:a", "b", "c", "p", "d[0]", "e", "f*"), csnn()[:7], strict=True):
        net.add_module(name, module)
    odd = sj_tac.convert(nn.Sequential(net, csnn()[7]), {"default": {"k": 3}, "rules": [{"match": "*d*", "k": 2}]})
    assert {name: s.k for name, (s, _) in sj_tac.policy_of(odd).resolve(["0.re:a", "0.d[0]", "0.d0"]).items()} == {
        "0.re:a": 3, "0.d[0]": 2, "0.d0": 2
    }  # fmt: skip
    sj_tac.save(odd, tmp_path / "odd.pt")
    assert same_state(sj_tac.load(tmp_path / "odd.pt", sj_tac.restore(odd)), odd)
