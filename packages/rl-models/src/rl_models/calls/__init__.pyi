from rl_models.calls.agreement import CallArguments as CallArguments, agree_on_call as agree_on_call
from rl_models.calls.dispatch import (
    Join as Join,
    Method as Method,
    dispatched as dispatched,
    divide as divide,
    for_all as for_all,
    methods_of as methods_of,
    on_cpu as on_cpu,
    per_sequence as per_sequence,
)
from rl_models.calls.distillation import (
    TEACHER_IDS as TEACHER_IDS,
    TEACHER_LOG_PROBS as TEACHER_LOG_PROBS,
    TEACHER_STATES as TEACHER_STATES,
    Divergence as Divergence,
)
from rl_models.calls.generation import (
    DECODING_STEPS as DECODING_STEPS,
    PROMPT_TOKENS_COMPUTED as PROMPT_TOKENS_COMPUTED,
)
from rl_models.calls.passes import accumulate as accumulate
from rl_models.calls.routing import ROUTING as ROUTING
from rl_models.calls.tensor_digests import checksum as checksum
