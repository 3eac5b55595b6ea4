"""The graph passes of sj_tac, one file each: trace, graph, chains, rates, fuse, swap, verify. Each returns what it found
and changes nothing, but for swap, which changes classes only once everything before it has agreed."""
