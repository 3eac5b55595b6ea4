"""Make a layout true in a model, and unmake it: class swaps, the hooks of collapsed regions, nothing else."""

from __future__ import annotations

from torch import nn
from torch.utils.hooks import RemovableHandle

from rewrites.rates import Layout
from sj_tac import host
from sj_tac.runtime.root import Enter, Expand, Leave
from sj_tac.runtime.swapped import is_swapped
from sj_tac.runtime.swaps import absorb, release


def apply(model: nn.Module, layout: Layout) -> list[RemovableHandle]:
    """Swap every module of the layout, releasing what an earlier layout swapped and this one does not.

    Nothing here can fail half-way: the layout was checked when it was made.

    Returns:
        Handles of the hooks; keep them in what is pickled with the model, so that hooks added after loading get other ids.
    """
    wanted = {id(swap.module) for swap in layout.swaps}
    for module in model.modules():
        if is_swapped(module) and id(module) not in wanted:
            release(module)
    for swap in layout.swaps:
        absorb(swap)
    handles: list[RemovableHandle] = []
    if layout.fusions or any(not drive.out.is_plain for drive in layout.drives.values()):
        handles.append(model.register_forward_pre_hook(Enter(layout.timeline), prepend=True))
        handles.append(model.register_forward_hook(Leave(layout.timeline), always_call=True))
    for module, place in layout.exits:
        # In front of the user's own hooks, which then see frames.
        handles.append(module.register_forward_hook(Expand(place), prepend=True))
    host.forget_reset_cache(model)
    return handles


def undo(model: nn.Module, handles: list[RemovableHandle]) -> None:
    """Give every module its own class back."""
    for handle in handles:
        handle.remove()
    for module in model.modules():
        if is_swapped(module):
            release(module)
    host.forget_reset_cache(model)
