# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3 Fine-tune, calibrate, go back
#
# A larger k is faster and loses more. In this tutorial you convert a net more coarsely than it likes, see what is
# lost, and get it back in two ways: `match`, which needs no labels and no training, and a few steps of fine-tuning.
# Then you go back to your own class.

# %%
import sys

# The net, its checkpoint and the data are those of the examples folder; a notebook runs in its own folder, so it is here:
sys.path.insert(0, "../../examples")

import warnings

import datasets
import nets
import quickstart
import torch
from matplotlib import pyplot as plt
from spikingjelly.activation_based import functional
from torch import nn

import sj_tac

plt.rcParams["figure.dpi"] = 75
_ = torch.manual_seed(0)

# %% [markdown]
# ## The net and its data
#
# The digit net of the first two tutorials, with 600 of its shipped images, rate-coded in T = 16 steps. 600 are for
# calibration and training, 400 are for testing, every class in proportion. One test image is a quarter of a point of
# accuracy.

# %%
task = quickstart.digits()
net = task.net
test, train = datasets.split_off(task.labels[:600], 250, seed=0)
train_frames, test_frames, test_labels = task.frames[:, train], task.frames[:, test], task.labels[test]
print("train", list(train_frames.shape), "test", list(test_frames.shape))


@torch.no_grad()
def votes(net, frames):
    """Mean votes [N, classes] for frames [T, N, C, H, W], from rest, in eval mode."""
    net.eval()
    functional.reset_net(net)
    found = net(frames).mean(0)
    functional.reset_net(net)
    return found


expected = votes(net, test_frames)
results = {}


def show(name, net):
    """Accuracy, agreement with the source, and the distance (root mean square) of its votes to the source's."""
    found = votes(net, test_frames)
    results[name] = {
        "accuracy": (found.argmax(1) == test_labels).double().mean().item(),
        "agreement": (found.argmax(1) == expected.argmax(1)).double().mean().item(),
        "distance": (found - expected).square().mean().sqrt().item(),
    }
    print(f"{name:24s}", "  ".join(f"{key} {value:.4f}" for key, value in results[name].items()))


# %% [markdown]
# ## What is lost
#
# This net loses little in preserve and in collapse, even at k = T. So take the coarsest form there is: collapse with
# `spikes: binary`, where a neuron emits at most one spike for a whole group of k steps. It is the form in which the
# paper writes its TAC, and it was made for training from scratch.


# %%
def policy(k):
    """One spike per group of k steps."""
    return {"default": {"mode": "collapse", "k": k, "spikes": "binary"}}


show("source", net)
show("collapse, k=16", sj_tac.convert(net, "collapse", 16))
for k in (2, 4, 16):
    show(f"one spike, k={k}", sj_tac.convert(net, policy(k)))
assert results["collapse, k=16"]["agreement"] >= 0.97
assert results["one spike, k=16"]["distance"] > results["one spike, k=2"]["distance"] > 0
assert results["one spike, k=16"]["agreement"] < results["collapse, k=16"]["agreement"]
assert results["one spike, k=16"]["accuracy"] <= results["source"]["accuracy"] - 0.02

# %% [markdown]
# At k = 16 the whole recording is one step. Some points of accuracy are gone. The distance of the votes says the same
# more finely.
#
# ## Without labels: match
#
# A mean of k frames varies less than the frames do. So neurons may fire less often, or more often, than in the
# source. `sj_tac.match` corrects that on a few samples without labels. It fits several corrections on one half of the
# samples and compares them with the source on the other half. It keeps the nearest, or *none* if the net is nearest
# as it is. The corrections are written into BatchNorm's running statistics, so no key is added and nothing becomes
# slower.

# %%
matched = sj_tac.convert(net, policy(16))
found = sj_tac.match(matched, [train_frames[:, :128]], progress=False)
print(found)
show("matched, k=16", matched)
assert found.after.distance <= found.before.distance
assert results["matched, k=16"]["distance"] < results["one spike, k=16"]["distance"]
assert results["matched, k=16"]["agreement"] >= results["one spike, k=16"]["agreement"]
assert list(matched.state_dict()) == list(net.state_dict())

# %% [markdown]
# The table has the firing rates of every neuron. The lines below it have what every method gives on samples that it
# was not fitted on: agreement, and the KL divergence of the outputs. The net is nearer to its source, in its votes
# and in its predictions. IF neurons gain most ([Accuracy](../accuracy.md) has measurements).
#
# Matching belongs to one k. It can be taken back:

# %%
sj_tac.match(matched, undo=True)
assert all(torch.equal(a, b) for a, b in zip(matched.state_dict().values(), net.state_dict().values(), strict=True))

# %% [markdown]
# ## Without labels: recalibrate
#
# `sj_tac.recalibrate` re-estimates BatchNorm's statistics on aggregated frames of your samples. It does not ask the
# source. It is meant for data that have shifted since training. Whether it helps otherwise is a question of the net,
# so measure it, and take it back if it does not.

# %%
recalibrated = sj_tac.convert(net, policy(16))
print("re-estimated:", sj_tac.recalibrate(recalibrated, [train_frames[:, :128]]))
show("recalibrated, k=16", recalibrated)
sj_tac.recalibrate(recalibrated, undo=True)
assert all(torch.equal(a, b) for a, b in zip(recalibrated.state_dict().values(), net.state_dict().values(), strict=True))

# %% [markdown]
# ## Fine-tune
#
# What is left after that wants training. The loop is the one that you have. Two things matter:
#
# - `sj_tac.freeze_bn(fast)` keeps BatchNorm's running statistics, also under `fast.train()`. Means of frames have
#   less variance than frames, so statistics taken from them would not fit k = 1 any more. Scale and shift are
#   trained.
# - `functional.reset_net(fast)` after every batch, as always.
#
# The target here is the source's own votes, so still no label is needed. A loss with labels goes in the same place.

# %%
fast = sj_tac.convert(net, policy(16))
print("frozen:", sj_tac.freeze_bn(fast))
target = votes(net, train_frames)
optimizer = torch.optim.Adam(fast.parameters(), 1e-3)
fast.train()

losses = []
for _ in range(40):
    chosen = torch.randperm(len(train))[:50]
    loss = nn.functional.mse_loss(fast(train_frames[:, chosen]).mean(0), target[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    functional.reset_net(fast)
    losses.append(loss.item())

show("fine-tuned, k=16", fast)
assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
assert results["fine-tuned, k=16"]["distance"] < 0.9 * results["one spike, k=16"]["distance"]

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
left.plot(losses, color="#2a6fbb")
left.set(xlabel="step", ylabel="loss", title="fine-tuning")
names = ["one spike, k=16", "recalibrated, k=16", "matched, k=16", "fine-tuned, k=16", "collapse, k=16"]
right.barh(names, [results[name]["distance"] for name in names], color="#2a6fbb")
right.invert_yaxis()
right.set(xlabel="distance of the votes to the source's")
figure.tight_layout()

# %% [markdown]
# Forty steps of fifty images give back most of the predictions.
#
# ## Go back
#
# The keys are the source's. So the fine-tuned checkpoint loads into your own class, strictly. `restore` gives the
# same net without a second model.

# %%
mine = nets.DigitNet()
print(mine.load_state_dict(fast.state_dict(), strict=True))
back = sj_tac.restore(fast)
assert type(back) is type(mine) is nets.DigitNet
assert torch.equal(votes(back, test_frames[:, :50]), votes(mine, test_frames[:, :50]))
show("fine-tuned, back at k=1", back)
assert results["fine-tuned, back at k=1"]["agreement"] >= 0.95

# %% [markdown]
# These weights were tuned at k = 16, and with BatchNorm frozen they still serve at k = 1. That is no law: what you
# tune at one k is fitted to that k. Keep the source's checkpoint. The source net itself was never touched:

# %%
assert torch.equal(votes(net, test_frames), expected)

# %% [markdown]
# ## What freeze_bn is for
#
# Without it the statistics move while frames are aggregated. `restore` and `set_k` say so:

# %%
moved = sj_tac.convert(net, policy(16)).train()
moved(train_frames[:, :20])
functional.reset_net(moved)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    sj_tac.restore(moved)
print(told[0].message)
assert len(told) == 1
assert "freeze_bn" in str(told[0].message)

# %% [markdown]
# ## Another k
#
# `set_k` changes k in place, in all layers or in some. Parameters and optimizer stay. At k = 1 in every layer the net
# predicts as its source does again.

# %%
fast = sj_tac.convert(net, "preserve", 16)
sj_tac.set_k(fast, 8)
sj_tac.set_k(fast, 2, "features.0")
print([(verdict.layer, verdict.k) for verdict in sj_tac.report(fast).converted])
show("preserve, k=2 and 8", fast)
sj_tac.set_k(fast, 1)
show("preserve, k=1", fast)
assert results["preserve, k=1"]["agreement"] >= 0.995
assert results["preserve, k=2 and 8"]["agreement"] >= 0.97

# %% [markdown]
# ## Where to go from here
#
# - [4 Streaming](4-streaming.ipynb): an event camera, k frames at a time.
# - [Choosing a policy](../choosing.md#match): when match, when recalibrate, when fine-tuning.
# - [Lightning and Accelerate](../howto/lightning.md): the same in their loops, and k as a schedule.
