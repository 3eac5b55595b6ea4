"""A net's inference as a CUDA graph: the kernels of one call are recorded once, and replayed without Python."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sj_tac import host
from sj_tac.definition.collapse import Mean
from sj_tac.definition.convs import SharedConv
from sj_tac.definition.neurons import Merging
from sj_tac.errors import CaptureError, InputError

# Calls before the recording: kernels are compiled and chosen, and libraries get their memory.
WARM_UP = 3
_NUMBERS = {int, float, bool, str, tuple, type(None), torch.dtype, torch.device, Merging}


def capture(net: nn.Module, example: Tensor, *, state: Literal["reset", "carried"] = "reset") -> Captured:
    """Record a net's inference on ``example`` as a CUDA graph, and return a callable that replays it.

    Python and launches cost more than small maps do on a GPU; a replay has neither. The kernels are those of the call that
    was recorded, so that shapes, weights and options must stay: every call looks whether they have.

    Args:
        net: a net in eval mode whose parameters are on the GPU, converted or not. It is left at rest.
        example: frames [T, N, C, H, W] on the GPU, or what else the net takes as its only argument; its numbers do not
            matter.
        state: "reset": every call begins at rest, as after ``functional.reset_net``. "carried": a call goes on from the
            voltages of the call before it, as a stream of chunks does; ``reset()`` of the callable puts them at rest.

    Returns:
        ``Captured``: ``captured(x)`` gives what ``net(x)`` gives without gradients, in tensors of its own.

    Raises:
        CaptureError: no CUDA tensor, a net in training mode, or a forward that waits for the GPU.
        InputError: an example that is no tensor.

    Source: CUDA graphs as torch.cuda.CUDAGraph has them.
    """
    if not isinstance(example, Tensor):
        raise InputError(f"capture takes one tensor as the example, got {type(example).__name__}")
    if state not in ("reset", "carried"):
        raise CaptureError(f'state={state!r}: "reset" begins every call at rest, "carried" goes on from the call before')
    if net.training:
        raise CaptureError("capture records inference, and the net is in training mode; call net.eval() first")
    _check_device(example)
    return Captured(net, example, state == "carried")


class Captured:
    """A net's call as a CUDA graph, made by ``capture``. Call it as the net: ``captured(x)``."""

    def __init__(self, net: nn.Module, example: Tensor, carried: bool) -> None:
        self.net, self.carried = net, carried
        self._x = example.detach().clone()
        self._states: list[tuple[Any, str, Tensor, Any]] = []
        with torch.no_grad():
            if carried:
                self._states = _states(net, self._x)
            try:
                self._out, self._replay = record(self._run, self._x.device)
            except CaptureError:
                raise
            except Exception as error:
                raise CaptureError(
                    f"this net's call cannot be recorded as a CUDA graph: {type(error).__name__}: {error}. A forward that "
                    "reads numbers of the GPU (item, nonzero, bool of a tensor) or makes tensors on the host has to wait, "
                    "which a graph cannot; call the net itself"
                ) from error
            finally:
                host.reset(net)
        self._known = _fingerprint(net)
        self.reset()

    def _run(self) -> Any:
        """One call, from static tensors into static tensors."""
        if not self.carried:
            host.reset(self.net)
        for module, name, held, _ in self._states:
            module._memories[name] = held
        out = self.net(self._x)
        for module, name, held, _ in self._states:
            held.copy_(module._memories[name])
        return out

    def __call__(self, x: Tensor) -> Any:
        """What ``net(x)`` gives, in tensors of its own.

        Raises:
            InputError: another shape, dtype or device than the example's. CaptureError: the net was changed since.
        """
        known = self._x
        if not isinstance(x, Tensor) or x.shape != known.shape or x.dtype != known.dtype or x.device != known.device:
            found = f"{list(x.shape)} of {x.dtype} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError(
                f"this call was captured for {list(known.shape)} of {known.dtype} on {known.device}, got {found}; capture "
                "the net again with such an example"
            )
        if _fingerprint(self.net) != self._known:
            raise CaptureError(
                "the net was changed since its call was captured (parameters, buffers, a module's numbers or hooks, k, or "
                "autocast), and a replay would not know; capture it again"
            )
        with torch.no_grad():
            known.copy_(x)
            self._replay()
            return tree_map(lambda out: out.clone() if isinstance(out, Tensor) else out, self._out)

    def reset(self) -> None:
        """Put the carried voltages at rest; nothing to do where every call begins there."""
        with torch.no_grad():
            for _, _, held, rest in self._states:
                if isinstance(rest, Tensor):
                    held.copy_(rest)
                else:
                    held.fill_(rest)


def _check_device(example: Tensor) -> None:
    if example.device.type != "cuda":
        raise CaptureError(
            f"capture records CUDA graphs, and the example is on {example.device}; move the net and the example to the GPU, "
            "or call the net itself"
        )


def record(run: Callable[[], Any], device: torch.device) -> tuple[Any, Callable[[], None]]:
    """Static outputs of ``run``, and what computes them anew. Where it raises, torch is as it was."""
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(WARM_UP - 1):
            run()
        with _refusing_to_wait():
            run()
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        here = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph):
                out = run()
        except BaseException:
            _abandon(graph, here)
            raise
    return out, graph.replay


@contextlib.contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """RuntimeError where torch waits for the GPU: found before a recording begins, which could only fail."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        _on_waiting("error")
        yield
    finally:
        _on_waiting(before)


def _on_waiting(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not notice all that waits, which is known here
        torch.cuda.set_sync_debug_mode(mode)


def _abandon(graph: torch.cuda.CUDAGraph, here: torch.cuda.Stream) -> None:
    """Mend what torch leaves of a recording that failed: its stream is the current one, its memory is not given back, and
    the random generator takes it to go on, so that no random number could be drawn any more.
    """
    torch.cuda.set_stream(here)
    with contextlib.suppress(Exception):
        torch._C._cuda_endAllocateToPool(here.device_index, graph.pool())
    with contextlib.suppress(Exception), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=here.device)  # a recording that ends as it should is what ends the generator's
    torch.cuda.set_stream(here)


def _states(net: nn.Module, x: Tensor) -> list[tuple[Any, str, Tensor, Any]]:
    """Module, name, a static tensor, and the resting value, of every memory that a call leaves a tensor in."""
    host.reset(net)
    modules = [m for m in net.modules() if isinstance(m, host.MemoryModule)]
    rest = [dict(m._memories) for m in modules]
    net(x)
    found = []
    for module, before in zip(modules, rest, strict=True):
        for name, value in module._memories.items():
            if not isinstance(value, Tensor):
                continue
            if not isinstance(before[name], (int, float, Tensor)):
                raise CaptureError(
                    f"the memory {name!r} of {type(module).__name__} rests at {before[name]!r}, which a graph cannot go on "
                    'from; turn it off (store_v_seq), or capture with state="reset"'
                )
            found.append((module, name, value.detach().clone(), before[name]))
    host.reset(net)
    return found


def _fingerprint(net: nn.Module) -> list[Any]:
    """What a recorded call depends on: where tensors lie and how often they were written, modules' numbers and hooks, k."""
    cast = torch.is_autocast_enabled("cuda")
    found: list[Any] = [cast, torch.get_autocast_dtype("cuda") if cast else None]
    found += [_place(tensor) for tensor in (*net.parameters(), *net.buffers())]
    for module in net.modules():
        held = module.__dict__
        # A forward may read any number of its own; memories and what lies in lists are not looked at.
        numbers = [value for value in held.values() if type(value) in _NUMBERS]
        tensors = [_place(value) for value in held.values() if isinstance(value, Tensor)]
        hooks = [*held["_forward_hooks"], *held["_forward_pre_hooks"]]
        means = [(hook.steps, hook.rate) for hook in held["_forward_hooks"].values() if isinstance(hook, Mean)]
        found.append((id(module), numbers, tensors, hooks, means))
        if isinstance(module, SharedConv):
            sharing = module.sharing
            found.append((sharing.k, sharing.weights, sharing.normalize, sharing.stretch, sharing.rate, sharing.dtype))
    return found


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
