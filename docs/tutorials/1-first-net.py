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
# # 1 Your first net
#
# You have a pretrained SpikingJelly CNN. In this tutorial you convert one, read what became of it, check that it
# still predicts the same, measure how fast it is, save it, load it, and go back to the net that you had.
#
# The net is a small one for MNIST digits. It comes with its checkpoint and with 1,000 real test images. Nothing is
# trained.

# %%
import sys

# The nets, the checkpoints and the data are those of the examples folder; a notebook runs in its own folder, so it is here:
sys.path.insert(0, "../../examples")

import tempfile
from pathlib import Path

import nets
import quickstart
import torch
from matplotlib import pyplot as plt
from spikingjelly.activation_based import functional

import sj_tac

plt.rcParams["figure.dpi"] = 75

# %% [markdown]
# ## The net and its data
#
# `nets.DigitNet` is plain SpikingJelly: two blocks of Conv2d, BatchNorm2d, LIFNode and MaxPool2d, then a classifier.
# It does not know of sj_tac. It is in multi-step mode: a call takes all T time steps at once.

# %%
task = quickstart.digits()
net, frames, labels = task.net, task.frames[:, :200], task.labels[:200]
print(net)
print("frames", list(frames.shape), "labels", list(labels.shape))
assert frames.shape == (16, 200, 1, 28, 28)

# %% [markdown]
# Frames are `[T, N, C, H, W]`: 16 time steps, 200 images, one channel, 28 x 28 pixels. They are *rate-coded*: the
# brighter a pixel, the more likely it spikes, in every time step anew. Here is the first image, all 16 steps of it,
# and their mean.

# %%
figure, axes = plt.subplots(2, 9, figsize=(9, 2.3))
for t in range(16):
    axes[t // 8, t % 8].imshow(frames[t, 0, 0], cmap="gray_r")
    axes[t // 8, t % 8].set_title(f"t={t}", fontsize=8)
axes[0, 8].imshow(frames[:, 0, 0].mean(0), cmap="gray_r")
axes[0, 8].set_title("mean", fontsize=8)
for axis in axes.flat:
    axis.axis("off")

# %% [markdown]
# ## Convert
#
# One call. `policy="preserve"` keeps all T time steps; `k=4` says that four of them share one convolution.
# `example_input` is optional for a net like this one. With it the report can count operations.

# %%
fast = sj_tac.convert(net, policy="preserve", k=4, example_input=frames[:, :1])

# %% [markdown]
# What you get is a copy. Your model is untouched. The copy has the same class and the same checkpoint keys, in the
# same order.

# %%
assert fast is not net
assert type(fast) is type(net) is nets.DigitNet
assert list(fast.state_dict()) == list(net.state_dict())
print(type(fast).__name__, "with", len(fast.state_dict()), "keys, the first:", next(iter(fast.state_dict())))

# %% [markdown]
# ## Read the report

# %%
report = sj_tac.report(fast)
print(report)

# %% [markdown]
# There is one line for every convolution of the model, and none is skipped:
#
# - **layer** is the name of the convolution in your model.
# - **status** is *converted*: it runs once for k time steps. It could also be *kept* (you asked for that in a
#   policy), *refused* (it cannot be converted, and **why** gives the reason), or *stretched* (a neuron that is not
#   converted itself, but works on the collapsed time steps of a layer before it).
# - **mode** and **k** are what you asked for. A policy file can ask for something else in each layer.
# - **conv MACs/sample** are multiply-accumulates before and after: four times fewer.
# - **kernel** is what runs it. *fused* means that BatchNorm, the neuron's steps and the pooling after it are one
#   operator, which never writes the single spike frames to memory unless the next layer needs them.
#
# The same as data, for a script:

# %%
for verdict in report.converted:
    print(verdict.layer, verdict.status, verdict.mode, verdict.k, verdict.kernel)
assert [(v.layer, v.k) for v in report.converted] == [("features.0", 4), ("features.4", 4)]
assert not report.refused

# %% [markdown]
# `sj_tac.plan(net, "preserve", 4)` gives the same report without converting anything.
#
# ## Does it predict the same?
#
# A converted net is called like any SpikingJelly net: frames in, votes `[T, N, classes]` out, and the neurons are
# reset before the next samples.


# %%
@torch.no_grad()
def votes(net, frames):
    """Votes [T, N, classes] for frames [T, N, C, H, W], from rest."""
    functional.reset_net(net)
    return net(frames)


expected, found = votes(net, frames), votes(fast, frames)
assert found.shape == expected.shape == (16, 200, 10)

prediction, prediction_before = found.mean(0).argmax(1), expected.mean(0).argmax(1)
agreement = (prediction == prediction_before).double().mean().item()
accuracy, accuracy_before = ((p == labels).double().mean().item() for p in (prediction, prediction_before))
print(f"accuracy: {100 * accuracy_before:.1f} % before, {100 * accuracy:.1f} % after")
print(f"same prediction: {100 * agreement:.1f} % of the images")
assert agreement >= 0.98
assert accuracy >= accuracy_before - 0.015

# %% [markdown]
# Four frames now share one convolution, so single spikes differ and a few images may change their class. Nothing was
# fine-tuned. With k = 1, and without fusing, nothing is shared, and the output is SpikingJelly's bit for bit:

# %%
exact = sj_tac.convert(net, "preserve", 1, fuse=False)
assert torch.equal(votes(exact, frames), expected)

# %% [markdown]
# ## How fast is it?
#
# `sj_tac.bench` measures your net beside its conversions: the net as it is, the net with SpikingJelly's own folding
# of BatchNorm into the convolution, and every policy that you name. The speed-up is over the faster of the first two.

# %%
batches = [(frames[:, :20], labels[:20]), (frames[:, 20:60], labels[20:60])]  # the first batch is the one that is timed
table = sj_tac.bench(net, batches, ["preserve:2", "preserve:4", "preserve:8"], rounds=1, progress=False)
print(table)
print(f"{table.machine['cpu']}, {table.machine['threads']} thread(s), torch {table.machine['torch']}")

# %% [markdown]
# The line below the table names the machine of these figures. Milliseconds move from machine to machine and from run
# to run; the ratios move less. Few rounds on 20 images were measured here, to keep the tutorial short. Operations do
# not move:

# %%
source = table["SpikingJelly"]
assert [source.macs / table[f"preserve k={k}"].macs for k in (2, 4, 8)] == [2, 4, 8]
assert all(row.agreement >= 0.95 for row in table.rows)

# %% [markdown]
# ## Save and load
#
# One file holds the checkpoint and the policy. It is loaded into a fresh net of your class, strictly. The fresh net
# stays as it is; what comes back is a converted copy. `policy_of` gives its policy, here written as a policy file,
# which `convert` takes as well.

# %%
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "digits-k4.safetensors"
    sj_tac.save(fast, file)
    print(file.name, f"{file.stat().st_size / 1000:.0f} kB")
    again = sj_tac.load(file, nets.DigitNet())
    sj_tac.policy_of(again).save(Path(folder) / "policy.yaml")
    print((Path(folder) / "policy.yaml").read_text())

assert torch.equal(votes(again.eval(), frames), found)

# %% [markdown]
# ## Go back
#
# `restore` gives the net that you had. Because the keys are the same, the checkpoint goes back as well, strictly,
# into your own class.

# %%
back = sj_tac.restore(fast)
assert type(back) is nets.DigitNet
assert torch.equal(votes(back, frames), expected)

mine = nets.DigitNet().eval()
mine.load_state_dict(again.state_dict(), strict=True)
assert torch.equal(votes(mine, frames), expected)

# %% [markdown]
# ## Where to go from here
#
# - [2 Collapse or preserve](2-collapse-or-preserve.ipynb): which mode, and which k, for which data.
# - [3 Fine-tune, calibrate, go back](3-fine-tune-and-back.ipynb): what a large k loses, and how to get it back.
# - [4 Streaming](4-streaming.ipynb): an event camera, k frames at a time.
# - A layer of your net is *refused*? [What now](../refused.md), and [every reason](../reasons.md).
