"""Side-by-side measurements. ``python -m benchmarks.inference`` and ``python -m benchmarks.training``; see --help."""
