from parallel_layers.head.distillation import linear_distillation as linear_distillation
from parallel_layers.head.embedding import look_up as look_up
from parallel_layers.head.log_probs import vocab_parallel_log_probs as vocab_parallel_log_probs
from parallel_layers.head.sampling_mask import SamplingMask as SamplingMask
from parallel_layers.head.teachers import (
    Distillation as Distillation,
    TeacherHead as TeacherHead,
    TeacherSamples as TeacherSamples,
    TeacherTopK as TeacherTopK,
)
from parallel_layers.head.token_statistics import (
    TokenStatistics as TokenStatistics,
    linear_token_statistics as linear_token_statistics,
)
from parallel_layers.head.vocabulary import check_token_ids as check_token_ids, vocab_range as vocab_range
