"""Measurements on a net that runs: which modules are neurons, where frames are, which convolutions drive which neurons.

Nothing here knows a class of the user's. ``measured`` is the story. ``runs`` runs copies; ``survey`` looks at each module;
``neurons`` finds what mixes time; ``decays`` measures how much of a voltage is left after a step; ``codes`` reads, from
gradients, which frames each row of a convolution's output serves; ``likeness`` tests that a module treats frames alike;
``steps`` finds how T follows from a call's shapes; ``drives`` compares shared drives with the source's; ``axes`` finds which
dimension of an input is time.
"""
