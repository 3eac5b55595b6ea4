"""The graph passes of sj_tac, one file each: trace, flow, chains, timeaxis, fuse, swap, verify. Each returns what it found
and changes nothing, but for swap, which changes classes only once everything before it has agreed."""

# Whoever imports a pass first must not start it before sj_tac, whose convert imports the passes.
import sj_tac  # noqa: F401
