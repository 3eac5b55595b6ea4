"""docs/howto/lightning.md: its code runs as printed, and what it says of both libraries holds."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from spikingjelly.activation_based import functional

import sj_tac

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "lightning.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
# What the libraries say of themselves, and of those that they import; a warning of sj_tac's stays an error.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
]


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Accelerate keeps one state a process; every test begins without, and leaves none."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that runs those blocks of the page that have a word in them; all share one namespace."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {"__name__": "__main__"}

    def these(*words):
        for block in BLOCKS:
            if any(word in block for word in words):
                exec(compile(block, str(PAGE), "exec"), namespace)
        return namespace

    return these


def moved(before, net):
    """Names of the state that differs from what it was."""
    return {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}


def copied(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def test_the_page_is_one_story(run):
    assert len(BLOCKS) == 5
    found = run("import")
    assert type(found["model"]) is torch.nn.Sequential


def test_lightning_trains_a_converted_net_and_its_checkpoint_is_the_sources(run):
    found = run("model = nn.Sequential")
    before = copied(found["model"])
    found = run("L.LightningModule")
    fast = found["fast"]
    changed = moved(before, fast)
    # Convolution, scale and shift, and Linear are trained; the statistics are frozen.
    assert {"0.weight", "1.weight", "1.bias", "5.weight", "5.bias"} <= changed
    assert not any("running" in name or "num_batches" in name for name in changed)
    assert [v.k for v in sj_tac.report(fast).converted] == [4]
    assert moved(before, found["model"]) == set()
    found = run("load_from_checkpoint")
    assert moved(copied(fast), found["model"]) == set()
    assert type(found["model"][0]).__name__ == "Conv2d"
    assert not sj_tac_layers(found["model"])


def sj_tac_layers(net):
    return [name for name, module in net.named_modules() if type(module).__module__.startswith("sj_tac")]


def test_lightning_with_a_schedule_ends_at_k_1_as_the_sources_class(run, monkeypatch):
    found = run("model = nn.Sequential", "L.LightningModule")
    seen = []
    step = sj_tac.KSchedule.step
    monkeypatch.setattr(sj_tac.KSchedule, "step", lambda self, epoch: seen.append((epoch, step(self, epoch))) or seen[-1][1])
    with warnings.catch_warnings():
        warnings.simplefilter("error", sj_tac.errors.BatchNormMovedWarning)
        found = run("lightning_callback")
    assert seen == [(0, 4), (1, 2), (2, 1)]
    assert found["trainer"].callback_metrics["k"] == 1
    assert not sj_tac_layers(found["model"])


def test_accelerate_trains_a_converted_net(run):
    found = run("model = nn.Sequential")
    before = copied(found["model"])
    found = run("Accelerator(")
    assert moved(copied(found["fast"]), found["model"]) == set()
    changed = moved(before, found["model"])
    assert {"0.weight", "1.weight", "5.weight"} <= changed
    assert not any("running" in name for name in changed)


def test_accelerate_prepares_for_bfloat16_without_changing_what_runs(run):
    """The forward that ``prepare`` puts around the net, and its way back, against autocast by hand."""
    from accelerate import Accelerator

    found = run("model = nn.Sequential")
    frames = next(iter(found["loader"]))[0].transpose(0, 1)
    nets = [sj_tac.convert(found["model"].eval(), "preserve", k=4) for _ in range(2)]
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(nets[0])
    with torch.no_grad():
        given = prepared(frames)
        with torch.autocast("cpu", torch.bfloat16):
            expected = nets[1](frames)
    assert given.dtype == torch.float32
    assert torch.equal(given, expected.float())
    for net in nets:
        functional.reset_net(net)
    back = sj_tac.restore(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False))
    assert not sj_tac_layers(back)
    with torch.no_grad():
        assert torch.equal(back(frames), found["model"](frames))
