"""Make a plan true in a model, and unmake it: class swaps, the hooks of its root and where regions end, nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Collection

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sj_tac import host
from sj_tac.errors import ConversionError
from sj_tac.kernels import reference
from sj_tac.policy import SOURCE, Settings
from sj_tac.rewrites.chains import Chain
from sj_tac.rewrites.plan import Plan
from sj_tac.runtime import matched
from sj_tac.runtime.borders import PLAIN, Borders
from sj_tac.runtime.conv_swaps import DRIVE_SWAPS
from sj_tac.runtime.drives import Drive
from sj_tac.runtime.layers import Affine, Norm, Pool
from sj_tac.runtime.neurons import Unit
from sj_tac.runtime.root import Enter, Leave, Ordinary, link
from sj_tac.runtime.swaps import SWAPS, Role, absorb, is_swapped, release, source_class

# What statistics of a norm fit that no plan speaks of.
SINGLE = "the source's rate"


def apply(plan: Plan, model: nn.Module, corrected: Collection[str] = ()) -> list[RemovableHandle]:
    """Swap every module of the plan, releasing what an earlier plan swapped and this one does not.

    ``corrected``: modules whose statistics can be taken back; they and norms that are frozen or not the source's keep that.

    Nothing here can fail half-way: the plan was checked when it was made, and ``check_unedited`` looks at a model that may
    have been changed since.

    Returns:
        Handles of the hooks; keep them in what is pickled with the model, so that hooks added after loading get other ids.
    """
    layout = plan.layout
    collapses = any(place.settings.mode == "collapse" for place in layout.drives.values())
    borders = Borders(plan.fused, collapses, root=weakref.ref(model))
    absorb_all(plan, model, borders, corrected)
    handles = [
        model.register_forward_pre_hook(
            # Behind the user's own hooks, which may hand on other arguments.
            Enter(borders, plan.fusion.readers, plan.fusion.direct, plan.axes if layout.folds else None),
            with_kwargs=True,
        ),
        # In front of the user's own hooks, which then see ordinary frames.
        model.register_forward_hook(Leave(borders, layout.emits), prepend=True, always_call=True),
    ]
    modules = dict(model.named_modules())
    looking = {n for c in plan.chains.values() if isinstance(c, Chain) and c.folded for n in c.neurons}
    for name in layout.ends:
        if not is_swapped(modules[name]):
            handles.append(
                modules[name].register_forward_pre_hook(Ordinary(name, borders if name in looking else None), prepend=True)
            )
    host.forget_reset_cache(model)
    return handles


def check_unedited(plan: Plan, model: nn.Module, action: str) -> None:
    """Raise ConversionError where a module that the plan converted is gone, or is one that could not be converted."""
    modules, layout = dict(model.named_modules()), plan.layout
    drives = [
        (place.site, DRIVE_SWAPS[place.settings.mode]) for place in layout.drives.values() if place.settings.mode != "keep"
    ]
    units = [n for n in layout.units if n in plan.fusion.units or n not in layout.heads]
    for name, swaps in [*drives, *((name, SWAPS) for name in (*units, *layout.norms))]:
        if name in modules and (is_swapped(modules[name]) or host.kind(modules[name]) in swaps):
            continue
        now = f"a {type(modules[name]).__name__} now" if name in modules else "gone"
        raise ConversionError(
            f"{action}: module {name!r} was converted, and is {now}; the model was left as it was. Call sj_tac.restore on "
            "it, then convert it as it is now"
        )


def absorb_all(plan: Plan, model: nn.Module, borders: Borders, corrected: Collection[str] = ()) -> None:
    """The class swaps of a plan, without hooks."""
    roles = [*_roles(plan, model, borders), *_remembering(plan, model, borders, corrected)]
    wanted = {id(module) for module, _ in roles}
    for module in model.modules():
        if is_swapped(module) and id(module) not in wanted:
            release(module)
    for module, role in roles:
        absorb(module, role)
    link(model, plan.fusion.readers, plan.fusion.direct)


def _roles(plan: Plan, model: nn.Module, borders: Borders) -> list[tuple[nn.Module, Role]]:
    """What every module of the plan becomes."""
    modules, layout, fusion = dict(model.named_modules()), plan.layout, plan.fusion
    roles: list[tuple[nn.Module, Role]] = []
    for name, place in layout.drives.items():
        s = place.settings
        drive = Drive(name, modules[place.neuron], borders, s.mode, s.k, s.weights, s.normalize, s.spikes, place.span)
        drive.repeated, drive.batch_first = place.repeated, place.batch_first
        drive.dtype = None if s.dtype == SOURCE else getattr(torch, s.dtype)
        drive.backend = plan.backend if plan.fused else reference.NAME
        roles.append((modules[place.site], drive))
    pools = dict(layout.pools) | dict.fromkeys([*layout.before, *fusion.through], PLAIN)
    for name, unit_place in layout.units.items():
        fused = fusion.units.get(name)
        if fused is None and name in layout.heads:
            continue
        unit = Unit(name, borders, unit_place.span, unit_place.merge, unit_place.normalize)
        unit.pools_later, unit.backend, unit.folded = unit_place.pools_later, plan.backend, unit_place.folded
        unit.head = name in layout.heads
        if fused is not None and fused.pool is not None:
            unit.pool = modules[fused.pool]
            pools.setdefault(fused.pool, PLAIN)
        roles.append((modules[name], unit))
    for name, layer in layout.norms.items():
        settings = layout.drives[layer].settings if layer in layout.drives else None
        fits = "the rate of a collapse before it" if settings is None else _fits(settings)
        roles.append((modules[name], Norm(layer, borders, name in layout.aggregated, fits=fits)))
    roles += [(modules[name], Affine(name, borders)) for name in layout.affine]
    for name, span in pools.items():
        if not isinstance(modules[name], nn.Identity):
            roles.append((modules[name], Pool(name, borders, span, name in layout.pools)))
    return roles


def _remembering(plan: Plan, model: nn.Module, borders: Borders, corrected: Collection[str]) -> list[tuple[nn.Module, Role]]:
    """Norms that the plan leaves at the source's rate and that an earlier one did not, if they brought something along."""
    found: list[tuple[nn.Module, Role]] = []
    for name, module in model.named_modules():
        role = module.__dict__.get("_tac")
        if not isinstance(role, Norm) or not is_swapped(module) or name in plan.layout.norms:
            continue
        if role.frozen or role.moved or role.matched or name in corrected:
            found.append((module, Norm(role.name, borders, fits=SINGLE)))
    return found


def remember(model: nn.Module, names: Collection[str]) -> None:
    """Let those of these modules that are norms, and that the plan leaves at the source's rate, have a role all the same."""
    modules = dict(model.named_modules())
    borders = next(module._tac.borders for module in modules.values() if is_swapped(module))
    for name in names:
        module = modules.get(name)
        if module is None or is_swapped(module) or not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        if source_class(module) in SWAPS:
            absorb(module, Norm(name, borders, fits=SINGLE))


def _fits(s: Settings) -> str:
    return matched.words(s.mode, s.k, s.weights)


def undo(model: nn.Module, handles: list[RemovableHandle]) -> None:
    """Give every module its own class back."""
    for handle in handles:
        handle.remove()
    for module in model.modules():
        if is_swapped(module):
            release(module)
    host.forget_reset_cache(model)


def drop_hooks(model: nn.Module) -> None:
    """Take off every hook that a conversion hangs on modules."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "of_sj_tac", False)]:
                hooks.pop(key)
                for other in _beside(module):
                    other.pop(key, None)


def _beside(module: nn.Module) -> list[dict[int, bool]]:
    """Where torch notes more about hooks."""
    names = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
    return [vars(module)[name] for name in names if name in vars(module)]
