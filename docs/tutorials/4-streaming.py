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
# # 4 Streaming from an event camera
#
# A camera does not wait until the recording is over. Events come, they are counted into frames, and you want a
# prediction now. In this tutorial a converted net works on a stream: k frames a call, with the neurons' voltages
# carried from call to call. You see that this gives what one call on the whole recording gives, how long a prediction
# takes, and how a latency budget chooses k.
#
# `examples/streaming.py` is the same as a script, for recordings and nets of your own.

# %%
import sys

# The net, its checkpoint and the data are those of the examples folder; a notebook runs in its own folder, so it is here:
sys.path.insert(0, "../../examples")

import nets
import quickstart
import streaming
import torch
from matplotlib import pyplot as plt
from spikingjelly.activation_based import functional

import sj_tac

plt.rcParams["figure.dpi"] = 75

# %% [markdown]
# ## The recordings
#
# Twenty of the shipped N-MNIST recordings. Each one is 32 frames, which count the events of about ten milliseconds.

# %%
task = quickstart.events()
net, frames, labels = task.net, task.frames[:, :20], task.labels[:20]
frame_ms = streaming.frame_milliseconds(None, nets.EVENTS_T)
print("frames", list(frames.shape), f"of {frame_ms:.1f} ms each, a recording takes {len(frames) * frame_ms:.0f} ms")
assert frames.shape == (32, 20, 2, 34, 34)

# %% [markdown]
# ## A stream is a loop
#
# A *micro-batch* is a few frames `[t, N, C, H, W]`. SpikingJelly's neurons keep their voltage when a call ends, so
# the next call goes on from there. Reset the net when a new recording begins, and only then.

# %%
k = 4
fast = sj_tac.convert(net, "preserve", k)
recording = frames[:, :1]  # [32, 1, 2, 34, 34]: one camera

with torch.no_grad():
    functional.reset_net(fast)
    votes = [fast(recording[t : t + k]) for t in range(0, len(recording), k)]  # 8 calls of 4 frames
    functional.reset_net(fast)
    at_once = fast(recording)  # one call of 32 frames
    functional.reset_net(fast)

streamed = torch.cat(votes)
print(len(votes), "micro-batches of", list(votes[0].shape), "->", list(streamed.shape))
print(
    "predicted:",
    streamed.mean(0).argmax().item(),
    "in one call:",
    at_once.mean(0).argmax().item(),
    "label:",
    labels[0].item(),
)
assert streamed.shape == at_once.shape == (32, 1, 10)
assert torch.allclose(streamed, at_once, atol=1e-6)

# %% [markdown]
# ## Micro-batches are whole groups
#
# Groups of k frames begin anew with each call. So a micro-batch must hold whole groups: k frames, or 2k, and so on.
# With other sizes some groups are shorter, and that is another function. It may well predict the same, but it is not
# what you tested. `streaming.run` streams every recording by itself and compares it with one call on the whole
# recording:

# %%
for chunk in (4, 8, 6):
    found = streaming.run(fast, frames, chunk)
    whole = "whole groups" if streaming.is_whole(len(frames), chunk, k) else "NO whole groups"
    print(
        f"micro-batches of {chunk} frames, {whole}: votes differ by up to {found.difference:.2g}, "
        f"{found.agreeing} of 20 predictions agree"
    )
    if streaming.is_whole(len(frames), chunk, k):
        assert found.agreeing == 20
    else:
        assert found.difference > 0

# %% [markdown]
# ## How long does a prediction take?
#
# Two things make it late. The group's frames must be there: k times the duration of a frame. That is the look-ahead
# of preserve. Then the net has to run.
#
# Times of single calls vary, so look at percentiles: p95 is what 95 of 100 calls keep to.

# %%
found = streaming.run(fast, frames, k)
wait_ms = k * frame_ms
print(f"{len(found.ms)} calls of {k} frames; the camera takes {wait_ms:.1f} ms for that many")
for p, ms in found.percentiles().items():
    print(f"p{p}: {ms:.2f} ms in the net, {wait_ms + ms:.1f} ms behind the first event of the group")
assert len(found.ms) == 20 * 32 // k

figure, axis = plt.subplots(figsize=(6, 2.6))
axis.hist(found.ms, bins=40, color="#2a6fbb")
for p, ms in found.percentiles().items():
    axis.axvline(ms, color="#c0504d", linewidth=1)
    axis.annotate(f"p{p}", (ms, axis.get_ylim()[1] * 0.9), fontsize=8)
axis.set_xlabel("ms of a call")
axis.set_ylabel("calls")
figure.tight_layout()

# %% [markdown]
# The calls' times are this machine's, beside whatever else it was doing. Yours differ.
#
# ## A budget chooses k
#
# A larger k saves convolutions and waits longer. Say what a prediction may take in all, from the first event of a
# group to the votes. A k *fits* if it keeps to the budget, and if the net is done before the next micro-batch is
# there. Of those take the largest: it costs the least work.

# %%
budget_ms = 100
candidates = streaming.measured(net, recording, frame_ms, (1, 2, 4, 8, 16))
print(f"budget {budget_ms} ms\n k  waits  net p95  latency  fits")
for c in candidates:
    print(f"{c.k:2d} {c.wait_ms:6.1f} {c.call_ms:8.2f} {c.latency_ms:8.1f}  {'yes' if c.fits(budget_ms) else 'no'}")

fitting = [c for c in candidates if c.fits(budget_ms)]
best = streaming.chosen(candidates, budget_ms) if fitting else candidates[2]  # a very busy machine may fit none
print("chosen: k =", best.k)
assert not candidates[-1].fits(budget_ms)  # 16 frames alone take longer than that
assert best.k == max((c.k for c in fitting), default=4)

# %% [markdown]
# The milliseconds per frame say the rest: how much of a core the stream takes.

# %%
for c in candidates:
    print(f"k={c.k:2d}: {c.call_ms / c.k:.2f} ms of net for {frame_ms:.1f} ms of camera")

# %% [markdown]
# ## The prediction over time
#
# Again with k = 4. Votes are averaged over the steps seen so far. Early in a recording there is little to go by.
# Left: the mean votes of one recording. Right: the share of the 20 recordings whose leading class is right, by what
# has been seen of them.

# %%
run = streaming.run(fast, frames, k)
right = (run.predictions == labels).double().mean(1)  # [micro-batches]
seen = [until * frame_ms for until in run.until]

steps = list(streaming.stream(fast, recording, k))
mean = torch.cat([step.votes for step in steps])[:, 0].cumsum(0) / torch.arange(1, len(frames) + 1)[:, None]

figure, (left, other) = plt.subplots(1, 2, figsize=(9, 3))
for label in range(10):
    left.step(seen, [mean[u - 1, label].item() for u in run.until], where="post", label=str(label))
left.set(xlabel="ms of the recording", ylabel="mean vote", title=f"one recording of a {labels[0].item()}")
left.legend(fontsize=6, ncol=2, frameon=False)
other.step(seen, 100 * right, "o-", where="post", markersize=3, color="#2a6fbb")
other.set(xlabel="ms of the recording", ylabel="right, %", title="20 recordings")
figure.tight_layout()

print(f"after the first micro-batch {100 * right[0]:.0f} % are right, at the end {100 * right[-1]:.0f} %")
assert right[-1] >= 0.9
assert right[-1] > right[0]

# %% [markdown]
# ## Keep in mind
#
# - Micro-batches of whole groups: a multiple of k.
# - `functional.reset_net` between recordings, never within one.
# - With collapse it is the same, and the call's output has T frames again. Where k is larger than what a call brings,
#   groups are cut short.
# - One camera is a batch of N = 1. More cameras of the same pace go into the same call, N = 2 and more. The neurons
#   keep a voltage for each of them.
#
# On: `python examples/streaming.py --help`, which streams N-MNIST and DVS128 Gesture, and shows a recording live.
