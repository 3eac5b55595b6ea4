"""Copies of SpikingJelly's old files, as published models have them, on the installed host."""

from tests.compat.test_clock_driven import IMPORT, passes

# The first lines of the old neuron.py, which published models have copies of.
COPY = """
from spikingjelly.clock_driven import surrogate, base, lava_exchange
try:
    from spikingjelly.clock_driven import neuron_kernel, cu_kernel_opt
except ImportError:
    neuron_kernel = None
class Copied(base.MemoryModule):
    def to_lava(self):
        return lava_exchange.to_lava_neuron(self)
"""


def test_a_copy_of_the_old_neurons_can_be_imported():
    told = passes(
        IMPORT + f"exec({COPY!r})\ntry: Copied().to_lava()\nexcept ImportError as error: print(error)\nprint(neuron_kernel)"
    )
    assert "to_lava_neuron has no counterpart" in told
    assert told.split()[-1] == "None"
