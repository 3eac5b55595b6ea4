"""All that is SpikingJelly's: its types, its neurons' constants, its module state. Nothing else imports its internals.

Two hosts are known: 2.0, and 0.0.0.0.14 from before its rewrite (``IS_V2`` is False), whose neurons keep their state in
attributes of their own and which has no functions for the steps of a neuron.
"""

from sj_tac.host.kinds import (
    NOTHING_ADDED as NOTHING_ADDED,
    Unknown as Unknown,
    is_added_to as is_added_to,
    kind as kind,
    known_class as known_class,
)
from sj_tac.host.layers import (
    Affine as Affine,
    affine as affine,
    norm_numbers as norm_numbers,
    pool_frames as pool_frames,
    pool_window as pool_window,
)
from sj_tac.host.neurons import (
    FUSED_SURROGATES as FUSED_SURROGATES,
    charge_mode as charge_mode,
    decay as decay,
    fire_and_reset as fire_and_reset,
    fires_by_threshold as fires_by_threshold,
    fused_surrogate as fused_surrogate,
    input_gain as input_gain,
    neuron_problem as neuron_problem,
    resting_voltage as resting_voltage,
    steps_on as steps_on,
    surrogate as surrogate,
)
from sj_tac.host.registry import (
    is_registered_affine as is_registered_affine,
    is_registered_neuron as is_registered_neuron,
    is_the_hosts as is_the_hosts,
    register_affine as register_affine,
    register_neuron as register_neuron,
    registered_decay as registered_decay,
    steps_by_itself as steps_by_itself,
)
from sj_tac.host.state import (
    detached_memories as detached_memories,
    folded as folded,
    forget_reset_cache as forget_reset_cache,
    is_at_rest as is_at_rest,
    looked_at as looked_at,
    put_state as put_state,
    reset as reset,
    reset_memories as reset_memories,
    take_state as take_state,
    wide_dtype as wide_dtype,
)
from sj_tac.host.types import (
    AFFINE as AFFINE,
    ANY_MAX_POOLS as ANY_MAX_POOLS,
    AVG_POOLS as AVG_POOLS,
    CONTAINERS as CONTAINERS,
    CONVS as CONVS,
    DROPOUTS as DROPOUTS,
    FOLDED_CONVS as FOLDED_CONVS,
    FOLDED_FUSED_POOLS as FOLDED_FUSED_POOLS,
    FOLDED_LINEAR as FOLDED_LINEAR,
    FOLDED_LINEARS as FOLDED_LINEARS,
    FOLDED_MAX_POOLS as FOLDED_MAX_POOLS,
    FUSED_POOLS as FUSED_POOLS,
    INNER_AVG_POOLS as INNER_AVG_POOLS,
    INNER_CONVS as INNER_CONVS,
    INNER_LINEARS as INNER_LINEARS,
    IS_V2 as IS_V2,
    LIBRARY as LIBRARY,
    LINEAR_IN_TIME as LINEAR_IN_TIME,
    LINEARS as LINEARS,
    MAX_POOLS as MAX_POOLS,
    NEURONS as NEURONS,
    NORMS as NORMS,
    PER_FRAME as PER_FRAME,
    PLAIN_NORMS as PLAIN_NORMS,
    POOLS as POOLS,
    MemoryModule as MemoryModule,
    StepModule as StepModule,
    is_composite as is_composite,
    is_conv as is_conv,
    is_leaf as is_leaf,
    is_multi_step as is_multi_step,
    is_neuron as is_neuron,
    is_norm as is_norm,
    is_transposed as is_transposed,
    layer as layer,
    neuron as neuron,
    uses_batch_statistics as uses_batch_statistics,
)
