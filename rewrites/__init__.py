"""How a net is converted, and how its calls are made fast (docs/how-it-works.md).

``measure`` looks at a net that runs; ``decide`` says what a policy makes of it; ``plan`` holds both; ``pipeline`` applies a
plan. ``gate`` stands in front of a converted net's calls, ``capture`` has Dynamo capture them, ``equations`` rewrite the
graphs, and ``lower`` puts kernels into them.
"""
