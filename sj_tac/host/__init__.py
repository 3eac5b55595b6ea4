"""All that is SpikingJelly's: its types, its neurons' constants, its module state. Nothing else imports its internals.

Two hosts are known: 2.0, and 0.0.0.0.14 from before its rewrite (``IS_V2`` is False), whose neurons keep their state in
attributes of their own and which has no functions for the steps of a neuron.
"""

from sj_tac.host.kinds import (
    kind as kind,
    known_class as known_class,
)
from sj_tac.host.layers import (
    Affine as Affine,
    pool_frames as pool_frames,
    pool_window as pool_window,
)
from sj_tac.host.neurons import (
    FUSED_SURROGATES as FUSED_SURROGATES,
    SURROGATES_BY_NUMBER as SURROGATES_BY_NUMBER,
    Numbers as Numbers,
    decay as decay,
    fire_and_reset as fire_and_reset,
    fires_by_threshold as fires_by_threshold,
    fused_surrogate as fused_surrogate,
    has_known_decay as has_known_decay,
    has_scripted_steps as has_scripted_steps,
    input_gain as input_gain,
    many_numbers as many_numbers,
    may_be_vouched_for as may_be_vouched_for,
    neuron_problem as neuron_problem,
    number as number,
    numbers_of as numbers_of,
    resting_voltage as resting_voltage,
    steps_of as steps_of,
    steps_on as steps_on,
    surrogate as surrogate,
)
from sj_tac.host.records import (
    is_record as is_record,
    opened as opened,
    record_like as record_like,
)
from sj_tac.host.registry import (
    is_batch_first as is_batch_first,
    is_registered_neuron as is_registered_neuron,
    register_affine as register_affine,
    register_neuron as register_neuron,
    register_surrogate as register_surrogate,
)
from sj_tac.host.state import (
    carries_state as carries_state,
    detached_memories as detached_memories,
    folded as folded,
    foreign_hooks as foreign_hooks,
    forget_reset_cache as forget_reset_cache,
    is_at_rest as is_at_rest,
    looked_at as looked_at,
    put_state as put_state,
    reset as reset,
    reset_memories as reset_memories,
    stack_for as stack_for,
    take_state as take_state,
    wide_dtype as wide_dtype,
)
from sj_tac.host.types import (
    ANY_MAX_POOLS as ANY_MAX_POOLS,
    CONVS as CONVS,
    IS_V2 as IS_V2,
    LIBRARY as LIBRARY,
    MAX_POOLS as MAX_POOLS,
    NEURONS as NEURONS,
    NORMS as NORMS,
    POOLS as POOLS,
    MemoryModule as MemoryModule,
    StepModule as StepModule,
    is_conv as is_conv,
    is_multi_step as is_multi_step,
    is_neuron as is_neuron,
    layer as layer,
    neuron as neuron,
    uses_batch_statistics as uses_batch_statistics,
)
