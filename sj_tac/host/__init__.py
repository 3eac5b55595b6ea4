"""All that is SpikingJelly's: its types, its neurons' constants, its module state. Nothing else imports its internals.

Two hosts are known: 2.0, and 0.0.0.0.14 from before its rewrite (``IS_V2`` is False), whose neurons keep their state in
attributes of their own and which has no functions for the steps of a neuron.
"""

from sj_tac.host.layers import (
    Affine as Affine,
)
from sj_tac.host.layers import (
    affine as affine,
)
from sj_tac.host.layers import (
    pool_frames as pool_frames,
)
from sj_tac.host.layers import (
    pool_window as pool_window,
)
from sj_tac.host.neurons import (
    FUSED_SURROGATES as FUSED_SURROGATES,
)
from sj_tac.host.neurons import (
    charge_mode as charge_mode,
)
from sj_tac.host.neurons import (
    decay as decay,
)
from sj_tac.host.neurons import (
    fire_and_reset as fire_and_reset,
)
from sj_tac.host.neurons import (
    fires_by_threshold as fires_by_threshold,
)
from sj_tac.host.neurons import (
    fused_surrogate as fused_surrogate,
)
from sj_tac.host.neurons import (
    input_gain as input_gain,
)
from sj_tac.host.neurons import (
    neuron_problem as neuron_problem,
)
from sj_tac.host.neurons import (
    resting_voltage as resting_voltage,
)
from sj_tac.host.neurons import (
    steps_on as steps_on,
)
from sj_tac.host.neurons import (
    surrogate as surrogate,
)
from sj_tac.host.state import (
    detached_memories as detached_memories,
)
from sj_tac.host.state import (
    folded as folded,
)
from sj_tac.host.state import (
    forget_reset_cache as forget_reset_cache,
)
from sj_tac.host.state import (
    is_at_rest as is_at_rest,
)
from sj_tac.host.state import (
    looked_at as looked_at,
)
from sj_tac.host.state import (
    put_state as put_state,
)
from sj_tac.host.state import (
    reset as reset,
)
from sj_tac.host.state import (
    reset_memories as reset_memories,
)
from sj_tac.host.state import (
    take_state as take_state,
)
from sj_tac.host.state import (
    wide_dtype as wide_dtype,
)
from sj_tac.host.types import (
    AFFINE as AFFINE,
)
from sj_tac.host.types import (
    ANY_MAX_POOLS as ANY_MAX_POOLS,
)
from sj_tac.host.types import (
    AVG_POOLS as AVG_POOLS,
)
from sj_tac.host.types import (
    CONTAINERS as CONTAINERS,
)
from sj_tac.host.types import (
    CONVS as CONVS,
)
from sj_tac.host.types import (
    DROPOUTS as DROPOUTS,
)
from sj_tac.host.types import (
    FUSED_POOLS as FUSED_POOLS,
)
from sj_tac.host.types import (
    INNER_AVG_POOLS as INNER_AVG_POOLS,
)
from sj_tac.host.types import (
    INNER_CONVS as INNER_CONVS,
)
from sj_tac.host.types import (
    INNER_LINEARS as INNER_LINEARS,
)
from sj_tac.host.types import (
    IS_V2 as IS_V2,
)
from sj_tac.host.types import (
    LIBRARY as LIBRARY,
)
from sj_tac.host.types import (
    LINEAR_IN_TIME as LINEAR_IN_TIME,
)
from sj_tac.host.types import (
    LINEARS as LINEARS,
)
from sj_tac.host.types import (
    MAX_POOLS as MAX_POOLS,
)
from sj_tac.host.types import (
    NEURONS as NEURONS,
)
from sj_tac.host.types import (
    NORMS as NORMS,
)
from sj_tac.host.types import (
    PER_FRAME as PER_FRAME,
)
from sj_tac.host.types import (
    PLAIN_NORMS as PLAIN_NORMS,
)
from sj_tac.host.types import (
    POOLS as POOLS,
)
from sj_tac.host.types import (
    MemoryModule as MemoryModule,
)
from sj_tac.host.types import (
    StepModule as StepModule,
)
from sj_tac.host.types import (
    is_composite as is_composite,
)
from sj_tac.host.types import (
    is_conv as is_conv,
)
from sj_tac.host.types import (
    is_leaf as is_leaf,
)
from sj_tac.host.types import (
    is_multi_step as is_multi_step,
)
from sj_tac.host.types import (
    is_neuron as is_neuron,
)
from sj_tac.host.types import (
    is_norm as is_norm,
)
from sj_tac.host.types import (
    layer as layer,
)
from sj_tac.host.types import (
    neuron as neuron,
)
from sj_tac.host.types import (
    uses_batch_statistics as uses_batch_statistics,
)
