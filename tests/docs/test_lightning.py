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


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that runs those blocks of the page that have a word in them; all share one namespace."""
    from accelerate.state import AcceleratorState

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {"__name__": "__main__"}

    def these(*words):
        for block in BLOCKS:
            if any(word in block for word in words):
                exec(compile(block, str(PAGE), "exec"), namespace)
        return namespace

    # Accelerate keeps one state a process; every test begins without, and leaves none.
    AcceleratorState._reset_state(reset_partial_state=True)
    yield these
    AcceleratorState._reset_state(reset_partial_state=True)


def moved(before, net):
    """Names of the state that differs from what it was."""
    return {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}


def copied(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def sj_tac_layers(net):
    return [name for name, module in net.named_modules() if type(module).__module__.startswith("sj_tac")]


def test_lightning_trains_a_converted_net_and_its_checkpoint_is_the_sources(run, monkeypatch):
    found = run("model = nn.Sequential")
    before = copied(found["model"])
    fast = run("L.LightningModule")["fast"]
    # Convolution, scale and shift, and Linear are trained; the statistics are frozen.
    assert {"0.weight", "1.weight", "1.bias", "5.weight", "5.bias"} <= moved(before, fast)
    assert not any("running" in name or "num_batches" in name for name in moved(before, fast))
    assert [v.k for v in sj_tac.report(fast).converted] == [4]
    assert moved(before, found["model"]) == set()
    run("load_from_checkpoint")
    assert moved(copied(fast), found["model"]) == set()
    assert not sj_tac_layers(found["model"])
    # With a schedule it ends at k = 1 as the source's class.
    seen, step = [], sj_tac.KSchedule.step
    monkeypatch.setattr(sj_tac.KSchedule, "step", lambda self, epoch: seen.append((epoch, step(self, epoch))) or seen[-1][1])
    with warnings.catch_warnings():
        warnings.simplefilter("error", sj_tac.errors.BatchNormMovedWarning)
        run("lightning_callback")
    assert seen == [(0, 4), (1, 2), (2, 1)]
    assert found["trainer"].callback_metrics["k"] == 1
    assert not sj_tac_layers(found["model"])


def test_accelerate_trains_a_converted_net_and_changes_nothing_of_what_runs_in_bfloat16(run):
    """The forward that ``prepare`` puts around the net, and its way back, against autocast by hand."""
    from accelerate import Accelerator

    found = run("model = nn.Sequential")
    before, frames = copied(found["model"]), next(iter(found["loader"]))[0].transpose(0, 1)
    nets = [sj_tac.convert(found["model"].eval(), "preserve", k=4) for _ in range(2)]
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(nets[0])
    with torch.no_grad():
        given = prepared(frames)
        with torch.autocast("cpu", torch.bfloat16):
            expected = nets[1](frames)
    assert given.dtype == torch.float32
    assert torch.equal(given, expected.float())
    functional.reset_net(nets[0])
    back = sj_tac.restore(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False))
    assert not sj_tac_layers(back)
    with torch.no_grad():
        assert torch.equal(back(frames), found["model"](frames))
    accelerator.state._reset_state(reset_partial_state=True)
    functional.reset_net(found["model"])
    run("Accelerator(")
    assert moved(copied(found["fast"]), found["model"]) == set()
    assert {"0.weight", "1.weight", "5.weight"} <= moved(before, found["model"])
    assert not any("running" in name for name in moved(before, found["model"]))
