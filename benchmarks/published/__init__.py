"""Models of public repositories, read and run from a folder of checkouts: ``python -m benchmarks.published --help``."""
