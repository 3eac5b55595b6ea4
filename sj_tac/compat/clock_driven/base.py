"""The old ``spikingjelly.clock_driven.base``."""

from spikingjelly.activation_based.base import MemoryModule as MemoryModule

from sj_tac.compat.clock_driven import lost

__getattr__ = lost("spikingjelly.clock_driven.base", {})
