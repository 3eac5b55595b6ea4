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
# # 2 Collapse or preserve
#
# k frames share one convolution. What happens to time after that? There are two modes:
#
# - **preserve** (TAC-TP in the paper): the shared drive is given to all k steps of the neuron, one after the other. T
#   frames go in, T frames come out.
# - **collapse** (TAC in the paper): k frames become one. From there on the net works on T/k frames.
#
# The paper's finding is that the data decide. In rate-coded images time is noise, so it can be collapsed. In
# recordings of an event camera time is signal, so it should be preserved. Here you see both, side by side, on real
# data. Nothing is trained.

# %%
import sys

# The nets, the checkpoints and the data are those of the examples folder; a notebook runs in its own folder, so it is here:
sys.path.insert(0, "../../examples")

import quickstart
import torch
from matplotlib import pyplot as plt
from spikingjelly.activation_based import functional

import sj_tac

plt.rcParams["figure.dpi"] = 75
BLUE, GREEN, GREY, RED = "#2a6fbb", "#4f9a5b", "#8c8c8c", "#c0392b"

# %% [markdown]
# ## Two nets, two kinds of data
#
# - *digits*: MNIST test images, rate-coded in T = 16 steps. Every step is a random draw from the same image.
# - *events*: N-MNIST test recordings. A camera moves in front of a digit, and pixels report changes of brightness. T
#   = 32 frames count those events.

# %%
digits, events = quickstart.digits(), quickstart.events()
tasks = {"digits": digits, "events": events}
digits.frames, digits.labels = digits.frames[:, :100], digits.labels[:100]
for name, task in tasks.items():
    print(name, "frames", list(task.frames.shape), type(task.net).__name__)

figure, axes = plt.subplots(2, 8, figsize=(9, 2.6))
for row, (name, task) in zip(axes, tasks.items(), strict=True):
    for axis, t in zip(row, torch.linspace(0, len(task.frames) - 1, 8).long().tolist(), strict=True):
        axis.imshow(task.frames[t, 0].sum(0), cmap="gray_r")
        axis.set_title(f"{name} t={t}", fontsize=7)
        axis.axis("off")

# %% [markdown]
# The digit stays where it is, and its pixels flicker. The event camera's digit moves.
#
# ## Is time signal or noise?
#
# `sj_tac.diagnose` asks whether neighbouring frames are more alike than any two frames of the same sample. It
# re-orders the frames many times and compares. If order does not matter, the ratio is 1. No net is needed for that.

# %%
found = {name: sj_tac.diagnose([task.frames]) for name, task in tasks.items()}
for name, diagnosis in found.items():
    print(f"{name}: {diagnosis.verdict}, p = {diagnosis.p_value:.3g}, suggested k: {diagnosis.suggested_k}")
    print(*diagnosis.reasons, sep="\n", end="\n\n")
assert found["digits"].verdict == "collapse"
assert found["events"].verdict == "preserve"
assert found["events"].ratio < 0.8 < 0.95 < found["digits"].ratio

# %% [markdown]
# The suggested k is a place to begin, from the frames alone. With a net and labels, `sj_tac.diagnose(batches, net)`
# also measures the net's accuracy on shuffled and reversed frames, and every layer's input.
#
# ## Measure both modes
#
# Every policy is converted from the same checkpoint and predicts all samples. *Agreement* is the share of samples
# with the source's prediction. `sj_tac.bench` measures the times, on a small batch of five samples. With k = T all
# time steps share one convolution. With k = 1 nothing is shared, and both modes are the same net.

# %%
ks = {"digits": [1, 2, 4, 8, 16], "events": [1, 2, 4, 8, 32]}
measured = {}
for name, task in tasks.items():
    rows = [f"preserve:{k}" for k in ks[name]] + [f"collapse:{k}" for k in ks[name][1:]]
    times = sj_tac.bench(task.net, task.frames[:, :5], rows, rounds=1, progress=False)
    nets = {"SpikingJelly": task.net} | {row: sj_tac.convert(task.net, row) for row in rows}
    with torch.no_grad():
        predictions = {row: quickstart.predict(net, task.frames) for row, net in nets.items()}
    print(f"{name:14s}accuracy %  agreement %  ms, 5 samples")
    for row, predicted in predictions.items():
        accuracy = 100 * (predicted == task.labels).double().mean().item()
        agreement = 100 * (predicted == predictions["SpikingJelly"]).double().mean().item()
        ms = times[row.replace(":", " k=")].ms
        measured[name, row] = {"accuracy %": accuracy, "agreement %": agreement, "ms, 5 samples": ms}
        print(f"{row:14s}{accuracy:10.1f}  {agreement:11.1f}  {ms:14.1f}")
    measured[name, "collapse:1"] = measured[name, "preserve:1"]  # the same net
    print()
print(f"{times.machine['cpu']}, {times.machine['threads']} thread(s), torch {times.machine['torch']}")

# %% [markdown]
# Milliseconds are this machine's, named in the last line, of one or a few rounds. They move from run to run. Accuracy
# and agreement are those of 100 images and 100 recordings, so that one sample is 1 %.

# %%
figure, axes = plt.subplots(3, 2, figsize=(9, 7.5), sharex="col", sharey="row")
for column, name in enumerate(tasks):
    for axis, label in zip(axes[:, column], measured[name, "SpikingJelly"], strict=True):
        axis.axhline(measured[name, "SpikingJelly"][label], color=GREY, linewidth=1, label="SpikingJelly")
        for mode, colour in (("preserve", BLUE), ("collapse", GREEN)):
            axis.plot(ks[name], [measured[name, f"{mode}:{k}"][label] for k in ks[name]], "o-", color=colour, label=mode)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ks[name], ks[name])
        axis.set_ylabel("" if column else label)
    axes[0, column].set_title(name)
    axes[2, column].set_xlabel("k")
axes[2, 0].set_yscale("log")
axes[0, 0].legend(loc="lower left")
figure.tight_layout()

# %% [markdown]
# Read it column by column:
#
# - **digits**: all of time can go. One convolution for 16 steps, and the accuracy is within three points of the
#   source's. Both modes serve.
# - **events**: with k up to 4 both modes keep the predictions. With k = T = 32 the movement is averaged away, and so
#   is the accuracy.
# - **time**: nearly all of the gain is in sharing the convolution, which both modes do. So collapse is not a faster
#   regime in itself. It saves more where layers after the convolutions (Linear, say) are a large part of the work.

# %%
for mode in ("preserve", "collapse"):
    assert measured["digits", f"{mode}:16"]["agreement %"] >= 97
    assert all(measured["events", f"{mode}:{k}"]["agreement %"] >= 95 for k in (1, 2, 4))
    assert measured["events", f"{mode}:32"]["accuracy %"] <= measured["events", "SpikingJelly"]["accuracy %"] - 10

# %% [markdown]
# ## What look-ahead means
#
# A step of the source net knows the frames up to its own. With k frames sharing a convolution, the first step of a
# group is driven by a mean that has the group's last frame in it. So a step may know up to k - 1 frames of its
# future. For a whole recording that does not matter. For a stream it means that a group can only be computed when its
# last frame is there: see [4 Streaming](4-streaming.ipynb).
#
# You can see it. Change frame 6 and look at which steps of the output change:

# %%
recordings = events.frames[:, :20]
changed = recordings.clone()
changed[6] = 3 * recordings[7] + 1


@torch.no_grad()
def first_difference(net):
    """The first step whose votes differ when frame 6 does."""
    outputs = []
    for frames in (recordings, changed):
        functional.reset_net(net)
        outputs.append(net(frames))
    functional.reset_net(net)
    different = (outputs[0] != outputs[1]).flatten(1).any(1)
    return different.nonzero()[0].item()


print("source net: step", first_difference(events.net))
looking = {k: first_difference(sj_tac.convert(events.net, "preserve", k)) for k in (2, 4, 8)}
for k, step in looking.items():
    print(f"preserve k={k}: step {step}, in the group of steps {6 - 6 % k} to {6 - 6 % k + k - 1}")
assert first_difference(events.net) >= 6
assert all(step >= 6 - 6 % k for k, step in looking.items())

# %% [markdown]
# ## Let the search choose
#
# Layers differ in what they lose. `sj_tac.search` measures policies with a k for every layer, and gives the fastest
# one within a budget: here at most three points of accuracy on 40 recordings.
#
# By itself it measures milliseconds. Here it gets a `cost` instead, the multiply-accumulates of the convolutions, so
# that you find the same on your machine as on this page. What it calls speed-up is then how many times fewer they
# are. For real use leave `cost=` out. It is kept small for the tutorial: three ks, preserve only.

# %%
part, rest = zip(events.frames.split([40, 60], dim=1), events.labels.split([40, 60]), strict=True)  # 60 are for later
planned = sj_tac.plan(events.net, example_input=events.frames[:, :1])


def operations(net):
    """Multiply-accumulates of all convolutions, per sample, of the source or of a converted net."""
    if net is events.net:
        return sum(verdict.macs_before for verdict in planned.verdicts)
    return sum(verdict.macs_after for verdict in sj_tac.report(net).verdicts)


small = {"ks": (1, 2, 4), "modes": ("preserve",), "match": False}
policy = sj_tac.search(events.net, [part], max_drop=0.03, cost=operations, progress=False, **small)
evidence = policy.evidence
print(evidence)
assert evidence[evidence.chosen].metric >= evidence.source_metric - 0.03

# %% [markdown]
# Everything that it tried is in the evidence. The *Pareto frontier* joins the policies that no other one beats in
# both accuracy and speed.

# %%
tried = [trial for trial in evidence.trials if not trial.refused]
figure, axis = plt.subplots(figsize=(6, 3.6))
for uniform, colour, label in ((False, GREY, "k differs by layer"), (True, BLUE, "one k in all layers")):
    some = [trial for trial in tried if trial.uniform == uniform]
    axis.plot([t.speedup for t in some], [100 * t.metric for t in some], "o", color=colour, label=label)
axis.plot([t.speedup for t in evidence.frontier], [100 * t.metric for t in evidence.frontier], color=GREY, linewidth=1)
chosen = evidence[evidence.chosen]
axis.plot([chosen.speedup], [100 * chosen.metric], "*", color=RED, markersize=14, label="chosen")
axis.set_xlabel("times fewer operations than the source")
axis.set_ylabel("accuracy %")
axis.legend()
figure.tight_layout()

# %% [markdown]
# The policy fits the 40 recordings that it saw, so look at the others:

# %%
fast = sj_tac.convert(events.net, policy)
with torch.no_grad():
    before, after = (quickstart.predict(net, rest[0]) for net in (events.net, fast))
print(f"60 other recordings: {(after == before).sum()} of 60 predictions agree, {(after == rest[1]).sum()} of 60 are right")
assert (after == before).double().mean() >= 0.9

# %% [markdown]
# `policy.save("chosen.yaml")` keeps it, and `sj_tac.convert(net, "chosen.yaml")` uses it.
#
# ## Where to go from here
#
# - [3 Fine-tune, calibrate, go back](3-fine-tune-and-back.ipynb): what a larger k loses, and how to get it back.
# - [Choosing a policy](../choosing.md): how diagnose and search decide, and what they cannot see.
